"""`aenv up`: make this machine a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentenv.cli.exits import CliError
from agentenv.cli.output import ProgressReport, info
from agentenv.cli.verb import verb
from agentenv.core.built_in import BUILT_IN

if TYPE_CHECKING:
    from agentenv.config.schema import Config

STEP_DEADLINE_S = 600
"""How long a service manager is asked to wait for the next word of a first start, which fetches and builds."""


@verb("up", section="Node")
@click.option("--detach", "-d", is_flag=True, help="Run the server in the background and return once it answers.")
@click.option("--port", type=click.IntRange(1, 65535), help="TCP port to listen on.  [default: setting api.port]")
@click.option("--domain", metavar="NAME[:PORT]", help="Domain of the sandboxes' hosts; turns TLS on.  [default: setting api.domain]")
@click.option("--tls-port", type=click.IntRange(1, 65535), help="TCP port for TLS.  [default: setting api.tls_port]")
@click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="Where the node keeps its things.  [default: setting node.home]"
)
@click.option(
    "--template", "templates", multiple=True, type=click.Choice(BUILT_IN), help="Make this built-in template, too (repeatable); it is kept."
)
def command(
    detach: bool, port: int | None, domain: str | None, tls_port: int | None, home: Path | None, templates: tuple[str, ...]
) -> None:
    """Start the node; the first run sets it up.

    Checks what the host must offer, fetches the guest kernel and the VMM, builds the base template (minutes, once), and
    starts the server. Without --detach it stays in the foreground until Ctrl-C. Sandboxes outlive the server either way:
    a later `aenv up` finds them running. Does nothing when the server runs already.
    """
    from agentenv.cli.node import load_config, node_url, read_record
    from agentenv.cli.server import is_healthy, require_free_port, serve_here, start_lock
    from agentenv.host.listeners import from_service_manager

    given = {"api_port": port, "api_domain": domain, "api_tls_port": tls_port, "node_home": None if home is None else home.absolute()}
    config = load_config(**given)
    config = load_config(**given, templates_built_in=(*config.templates.built_in, *templates))
    record = read_record(config)
    if record is not None and record.is_alive():
        running = load_config(
            api_host=record.host,
            api_port=record.port,
            api_domain=record.domain,
            api_tls_port=record.tls_port,
            node_home=record.home,
        )
        if not is_healthy(running):
            with start_lock(config):  # held by the one that is starting it just now
                pass
        if not is_healthy(running):
            raise CliError(f"the server runs (pid {record.pid}) but does not answer on {node_url(running)}", "`aenv down`, then `aenv up`")
        _require_templates(templates)
        info(f"the node is already up: {node_url(running)} (pid {record.pid}, home {record.home})")
        return
    if record is not None and record.home != config.node.home:
        raise CliError(
            f"the last server of this node used the home {record.home}, and was not ended by `aenv down`",
            f"`aenv up --home {record.home}` goes on with it; `aenv down` ends what is left of it",
        )
    _require_host(config)
    handed_over = [] if detach else from_service_manager()
    with start_lock(config):
        for number in (config.api.port, config.api.tls_listen_port):
            if number is not None and number not in (sock.getsockname()[1] for sock in handed_over):
                require_free_port(config.api.host, number)
        _prepare(config)
        if detach:
            pid = _start(config)
            info(f"the node is up: {node_url(config)} (pid {pid}, home {config.node.home})")
            if config.api.tls_listen_port is not None:
                info(f"and with TLS: https://api.{config.api.client_domain}; `aenv ca` tells how clients come to trust it")
            info('next: eval "$(aenv env)" for E2B clients, or `aenv start`')
            return
    info(f"serving on {node_url(config)}; Ctrl-C stops the server, sandboxes go on")
    serve_here(config, handed_over)


def _require_templates(names: tuple[str, ...]) -> None:
    """CliError when the running node lacks one: templates are made while the server is down."""
    from agentenv.cli.api import Api

    if not names:
        return
    with Api() as api:
        known = {name for template in api.templates() for name in template.get("aliases", ())}
    missing = [name for name in names if name not in known]
    if missing:
        again = " ".join(f"--template {name}" for name in missing)
        raise CliError(f"the node is up without {', '.join(missing)}", f"`aenv down` (sandboxes are paused), then `aenv up {again}`")


def _require_host(config: Config) -> None:
    from agentenv.host.doctor import host_checks

    failed = [check for check in host_checks(config) if check.status == "fail"]
    if failed:
        lines = "\n".join(f"  {check.name}: {check.detail}\n      {check.hint}" for check in failed)
        raise CliError(f"this machine cannot be a node yet:\n{lines}", "`aenv doctor` shows every check")


def _prepare(config: Config) -> None:
    from agentenv import wiring
    from agentenv.host.notify import notify

    with ProgressReport() as progress:

        def report(step: str, done: int | None, total: int | None) -> None:
            progress(step, done, total)
            notify(f"STATUS={step}", f"EXTEND_TIMEOUT_USEC={STEP_DEADLINE_S * 1_000_000}")

        wiring.prepare(config, report)


def _start(config: Config) -> int:
    from agentenv.cli.server import start_detached

    with ProgressReport() as progress:
        return start_detached(config, lambda _spent_s: progress("start the server"))
