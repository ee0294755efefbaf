"""Clients of HiveServer2: the JDBC driver and Thrift calls of pyspark's jars, and logins over a bare socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from py4j.java_gateway import GatewayParameters, JavaGateway, JavaObject, launch_gateway
from py4j.protocol import Py4JJavaError, get_return_value

from kiln.deploy.stack.java import find_java
from kiln.pipelines.runtime.spark_environment import find_spark_home

START, OK, BAD, COMPLETE = 1, 2, 3, 5
"""statuses of Thrift's SASL messages"""

Row = tuple[str | None, ...]


class HiveError(Exception):
    """The server's words, as the client has them with all causes."""


@dataclass(frozen=True)
class HiveClient:
    """Speaks to the server on a port of 127.0.0.1."""

    gateway: JavaGateway
    port: int
    user: str
    password: str

    @contextmanager
    def connect(self, options: str = "") -> Iterator[JavaObject]:
        """A connection of the JDBC driver. `options`: what stands after the database in its address. HiveError."""
        address = f"jdbc:hive2://127.0.0.1:{self.port}/default{options}"
        with _java_errors():
            connection = self.gateway.jvm.java.sql.DriverManager.getConnection(address, self.user, self.password)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def thrift(self) -> Iterator[JavaObject]:
        """The calls of HiveServer2 after the login, without a session."""
        jvm = self.gateway.jvm
        base = jvm.org.apache.thrift.transport.TSocket("127.0.0.1", self.port)
        transport = jvm.org.apache.hive.service.auth.PlainSaslHelper.getPlainTransport(self.user, self.password, base)
        transport.open()
        try:
            protocol = jvm.org.apache.thrift.protocol.TBinaryProtocol(transport)
            yield jvm.org.apache.hive.service.rpc.thrift.TCLIService.Client(protocol)
        finally:
            transport.close()

    def open_session(self, calls: JavaObject, settings: Mapping[str, str]) -> JavaObject:
        """The server's answer to a new session with these settings."""
        request = self.gateway.jvm.org.apache.hive.service.rpc.thrift.TOpenSessionReq()
        request.setConfiguration(dict(settings))
        return calls.OpenSession(request)


def query(connection: JavaObject, sql: str) -> list[Row]:
    """All rows of a statement's answer, as text. HiveError."""
    with _java_errors():
        statement = connection.createStatement()
        try:
            return rows(statement.getResultSet()) if statement.execute(sql) else []
        finally:
            statement.close()


def rows(result: JavaObject) -> list[Row]:
    """All rows of a result set, as text."""
    columns = range(1, result.getMetaData().getColumnCount() + 1)
    found: list[Row] = []
    while result.next():
        found.append(tuple(result.getString(column) for column in columns))
    return found


@contextmanager
def hive_gateway() -> Iterator[JavaGateway]:
    """Start a JVM with the JDBC driver.

    PySpark replaces py4j's `get_return_value` for the whole process with one that describes each Java exception by
    Spark's JVM, where the id of this JVM's exception names another object. The original is put back meanwhile.
    """
    port = launch_gateway(
        classpath=f"{find_spark_home()}/jars/*",
        die_on_exit=True,
        javaopts=["-XX:TieredStopAtLevel=1"],
        java_path=str(find_java().executable),
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
    try:
        with patch("py4j.java_gateway.get_return_value", get_return_value):
            gateway.jvm.java.lang.Class.forName("org.apache.hive.jdbc.HiveDriver")
            yield gateway
    finally:
        gateway.shutdown()


def log_in(port: int, user: str, password: str) -> socket.socket:
    """Sends a login (RFC 4616) on a new connection, and leaves its answer to be read."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    told = f"\0{user}\0{password}".encode()
    connection.sendall(struct.pack(">BI", START, 5) + b"PLAIN" + struct.pack(">BI", OK, len(told)) + told)
    return connection


def answer(connection: socket.socket) -> tuple[int, str]:
    """The status and the text of a message of SASL. ConnectionError: the server has closed the connection."""
    status, size = struct.unpack(">BI", _read(connection, 5))
    return status, _read(connection, size).decode()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError(f"closed after {len(data)} of {size} bytes")
        data += part
    return data


@contextmanager
def _java_errors() -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as error:
        texts = []
        cause = error.java_exception
        while cause is not None:
            texts.append(str(cause.getMessage()))
            cause = cause.getCause()
        raise HiveError("\n".join(texts)) from error
