"""`kiln serve-sql`: read-only access for JDBC, ODBC and Thrift clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import ConfigOption, StateOption, lake_of, note_once, notes, settings_of

commands = typer.Typer()


@commands.command("serve-sql")
def serve_sql(
    port: Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Port on 127.0.0.1.")] = 10000,
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="User name for clients.")] = "kiln",
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File with the password on its first line. Default: sql-password in the state folder, generated.",
        ),
    ] = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Heap size of the server.")] = "1g",
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve tables and views to BI tools, read only.

    Runs Spark's Thrift server until Ctrl-C. HiveServer2 clients connect with user and password on loopback; there is no
    TLS, so use an SSH tunnel from other machines. It runs next to kiln run and reads what kiln run commits.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.deploy.query.serve.server import SqlEndpoint, start_server
    from kiln.deploy.query.serve.server import ensure_password_file as made

    door = SqlEndpoint(port, user, password_file or made(settings.state))
    console = notes()
    with start_server(settings, lake_of(settings), door, memory, note_once(console)) as server:
        console.print(f"{door.jdbc}  user {door.user}, password in {door.password_file}")
        server.wait_for_signal()
