"""`aegis-run --aegis-explain-flags`: what each given flag means here, and which defaults apply."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aegis_elastic.agents.ranks.torch_seam import command_of
from aegis_elastic.launch.flags import command_line
from aegis_elastic.launch.flags.options import Options
from aegis_elastic.launch.flags.parser import make_parser
from aegis_elastic.launch.screens import formatting

_AS_TORCHRUN = "as torchrun has it"
_SECRET = ("aegis_notify",)


def _nodes(options: Options) -> str:
    least, most = options.config.min_nodes, options.config.max_nodes
    if most == 1:
        return "one node"
    fewer = f", and goes on with as few as {least}" if least < most else ""
    return f"trains on {most} nodes{fewer}; more than {most} wait as spares"


def _endpoint(options: Options) -> str:
    port = options.endpoint.port
    if not port:
        return f"{options.endpoint.host}, any free port, for the control plane of this one node"
    if options.aegis.plane is not None:
        return f"{options.endpoint.host}:{port}, where nodes meet if the standing plane is out of reach"
    return f"{options.endpoint.host}:{port}: the node that owns this address serves the control plane there"


def _name(options: Options) -> str:
    if options.anonymous:
        return "not used: a job on one node that nobody reaches from outside has a name of its own"
    return f"the job's name, {options.job_name}: a launcher that is started again finds its accounts by it"


def _node_rank(options: Options) -> str:
    rank = "any" if options.node_rank is None else str(options.node_rank)
    worker = options.aegis.worker_name
    return f"this node's place, {rank}, under every backend (torchrun: static only); its worker is {worker}"


def _shutdown(options: Options) -> str:
    seconds = getattr(options.config, "shutdown_timeout", None)
    shown = "torch's default" if seconds is None else f"{seconds} s"
    return f"{shown} for ranks to end after a signal to the launcher; after a fault, --aegis-fault-grace-s"


# What each of torch's flags means here, by its name in torch's namespace. A test holds that none is missing.
TORCH_FLAGS: Mapping[str, Callable[[Options], str]] = {
    "nnodes": _nodes,
    "nproc_per_node": lambda o: f"{formatting.plural(o.config.nproc_per_node, 'rank')} on this node",
    "rdzv_backend": lambda o: "our control plane, at the endpoint; its name chooses nothing else",
    "rdzv_endpoint": _endpoint,
    "rdzv_id": _name,
    "rdzv_conf": lambda o: (
        f"join_timeout {o.join_timeout_s:g} s, last_call_timeout {o.last_call_s:g} s; others change nothing"
    ),
    "standalone": lambda o: "one node, its control plane on a free port of localhost",
    "max_restarts": lambda o: f"at most {o.max_restarts} restarts, counted once for all nodes of the job",
    "monitor_interval": lambda o: "not needed: the kernel reports the end of a rank at once",
    "start_method": lambda o: "changes nothing, as under torchrun: a command is always executed",
    "event_log_handler": lambda o: f"{_AS_TORCHRUN}; the journal is written anyway",
    "role": lambda o: f"{o.config.role!r}: {_AS_TORCHRUN}",
    "module": lambda o: _AS_TORCHRUN,
    "no_python": lambda o: _AS_TORCHRUN,
    "run_path": lambda o: _AS_TORCHRUN,
    "log_dir": lambda o: f"{_AS_TORCHRUN}; ours are in aegis/ beside those of the ranks",
    "redirects": lambda o: _AS_TORCHRUN,
    "tee": lambda o: _AS_TORCHRUN,
    "local_ranks_filter": lambda o: _AS_TORCHRUN,
    "duplicate_stdout_filters": lambda o: _AS_TORCHRUN,
    "duplicate_stderr_filters": lambda o: _AS_TORCHRUN,
    "node_rank": _node_rank,
    "master_addr": _endpoint,
    "master_port": _endpoint,
    "local_addr": lambda o: f"{o.config.local_addr}, where other nodes reach this one",
    "logs_specs": lambda o: _AS_TORCHRUN,
    "numa_binding": lambda o: _AS_TORCHRUN,
    "signals_to_handle": lambda o: f"{_AS_TORCHRUN}; SIGUSR1 and SIGUSR2 are passed on to the ranks besides",
    "shutdown_timeout": _shutdown,
    "virtual_local_rank": lambda o: _AS_TORCHRUN,
    "use_env": lambda o: "the script gets no --local-rank, as torch.distributed.launch has it",
}


def explain(argv: Sequence[str], options: Options, *, passes_local_rank: bool = False) -> str:
    """The table as text: a line for each given flag, for each variable that gives one, and for defaults."""
    parser = make_parser(passes_local_rank=passes_local_rank)
    flags, _ = command_line.split(argv, parser)
    rows = []
    explained = set()
    for given in flags:
        name = given.action.dest if given.action is not None else ""
        if name != "aegis_explain_flags":
            explained.add(name)
            rows.append((given.flag, _shown(name, given.value), _meaning(name, options)))
    for name, variable in _variables(parser):
        if variable in os.environ and name not in explained and name != "aegis_explain_flags":
            explained.add(name)
            rows.append((variable, _shown(name, os.environ[variable]), _meaning(name, options)))
    if "max_restarts" not in explained:
        rows.append(
            ("--max-restarts", "(not given)", f"{TORCH_FLAGS['max_restarts'](options)}; torchrun has 0")
        )
    if not explained & {"standalone", "rdzv_endpoint", "master_addr", "master_port"}:
        rows.append(("--rdzv-endpoint", "(not given)", _endpoint(options)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{flag:{widths[0]}}  {value:{widths[1]}}  {meaning}" for flag, value, meaning in rows]
    entrypoint, arguments = command_of(options.cmd, options.cmd_args)
    program = entrypoint if isinstance(entrypoint, str) else "the script's path, inside of each rank"
    return "\n".join([*lines, f"each rank runs: {shlex.join([program, *map(str, arguments)])}"])


def _variables(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Each flag's name and the variable that gives it."""
    names = dict.fromkeys(action.dest for action in parser._actions)
    return [(name, name.upper() if name.startswith("aegis_") else f"PET_{name.upper()}") for name in names]


def _shown(name: str, value: str) -> str:
    return "(secret)" if name in _SECRET else formatting.clean(value, 60)


def _meaning(name: str, options: Options) -> str:
    if name in TORCH_FLAGS:
        return TORCH_FLAGS[name](options)
    if name in _SECRET:
        return f"{formatting.plural(len(options.aegis.notify), 'address', 'addresses')} to page"
    value: Any = getattr(options.torch_args, name, None)
    return "on" if value is True else "off" if value is False else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return str(value) if isinstance(value, (str, int, float, Path)) else repr(value)
