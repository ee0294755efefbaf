"""`kiln serve-sql`: the tables for programs that speak JDBC, ODBC or Thrift, read only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kiln.deploy.cli.options import ConfigOption, StateOption, lake_of, note_once, notes, settings_of

commands = typer.Typer()


@commands.command("serve-sql")
def serve_sql(
    port: Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Port on 127.0.0.1.")] = 10000,
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="The name that clients give.")] = "kiln",
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Its first line is the password. Default: sql-password in the state folder, made with a random one.",
        ),
    ] = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Heap of the server.")] = "1g",
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve the tables and views to BI tools, until Ctrl-C or SIGTERM: Spark's Thrift server, read only.

    Clients of HiveServer2 connect by user and password, on loopback only. The server speaks no TLS: from another
    machine, come through an SSH tunnel. The server runs beside kiln run, and sees what kiln run writes.
    """
    settings = settings_of(config, state)
    from kiln.deploy.query.serve.server import SqlEndpoint, start_server
    from kiln.deploy.query.serve.server import ensure_password_file as made

    door = SqlEndpoint(port, user, password_file or made(settings.state))
    console = notes()
    with start_server(settings, lake_of(settings), door, memory, note_once(console)) as server:
        console.print(f"{door.jdbc}  user {door.user}, password in {door.password_file}")
        server.wait_for_signal()
