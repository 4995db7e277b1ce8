"""Turns the command line into the launch's `Options`, with torchrun's meaning of torchrun's flags.

`parse` validates every input before anything is started, and reproduces what `torch.distributed.run.run`
makes of `--standalone`, of a single node without a port, and of endpoints without one.
"""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.core.checkpoints.arguments import WatchedFolder
from aegis_elastic.core.policy.settings import Policy
from aegis_elastic.launch.flags import guard, validation
from aegis_elastic.launch.flags.parser import make_parser, resolve_environment
from aegis_elastic.launch.slurm import allocation

__all__ = ["AegisOptions", "Endpoint", "Options", "UsageError", "parse"]

MAX_RESTARTS_DEFAULT = 3
FAULT_GRACE_S = 1.0
LOCAL_ADDRESS = "127.0.0.1"  # torch's default for --master-addr
STATIC_PORT = 29500  # torchrun's for --master-addr without --master-port
C10D_PORT = 29400  # torchrun's for --rdzv-endpoint=HOST
# With these the endpoint is an address that a node of the job owns, where our control plane can listen.
_BACKENDS = ("static", "c10d", "aegis")


@dataclass(frozen=True)
class Endpoint:
    """Where the job's nodes meet; port 0 is any free one. `given`: the flags that have named it."""

    host: str
    port: int
    given: Literal["standalone", "master", "rdzv", "local"]


@dataclass(frozen=True)
class AegisOptions:
    """Our own flags (`aegis-run -h` explains each); paths are absolute, seconds and counts in range.

    `fallback_port` None: the endpoint's port + 1. `plane`: host and port of a standing one.
    `check_paths`: kind to directory, for the storage check. `check_budgets`: check to seconds, where they
    aren't the default. `gpus_per_node` None: those that are there. `ckpt_watch` None: by the script's
    arguments.
    """

    bootcheck: str
    troubleshoot: str
    fault_grace_s: float
    grace_given: bool
    warm_spares: str
    report: Path | None
    run_dir: Path | None
    state_dir: Path | None
    worker_name: str
    propagate_exit_code: bool
    join_secret_file: Path | None
    plane: tuple[str, int] | None
    require_secret: bool
    requeue: str
    plane_linger_s: float
    plane_restarts: int
    lost_timeout_s: float
    rejoin_timeout_s: float
    recovery_budget: int
    retry_decay: int
    renew_exit_code: int
    monitor: str
    monitor_interval_s: float
    metrics_port: int | None
    metrics_host: str
    log_level: str
    fallback_port: int | None
    check_paths: dict[str, Path]
    check_budgets: dict[str, float]
    gpus_per_node: int | None
    fail_fast: bool
    progress: str
    hang_after_s: float
    store: str | None
    taint_s: float
    probation_burn_s: float
    isolate_exit_code: int
    isolation: str
    isolation_max: int
    isolation_dry_run: bool
    record: str | None
    bus: str | None
    bus_keys: Path | None
    bus_ca: Path | None
    policy: Policy
    notify: tuple[str, ...]
    ckpt_watch: tuple[WatchedFolder, ...] | None
    strict_success: bool
    saver: str | None


@dataclass(frozen=True)
class Options:
    """All options of a launch.

    `torch_args`: torch's namespace after torchrun's own rules; `config`, `cmd`, `cmd_args`: what torch makes
    of it. `config.run_id` is the run id that ranks see, `job_name` the name under which the job's record is
    kept; `anonymous` if the user gave none. `node_rank` None: none given, any rank will do.
    """

    torch_args: argparse.Namespace
    config: LaunchConfig
    cmd: Callable[..., Any] | str
    cmd_args: list[str]
    endpoint: Endpoint
    job_name: str
    anonymous: bool
    namespace: str
    node_rank: int | None
    max_restarts: int
    max_restarts_given: bool
    join_timeout_s: float
    last_call_s: float
    aegis: AegisOptions


def parse(argv: Sequence[str], *, passes_local_rank: bool = False) -> Options:
    """Read the command line (without the program's name) and the variables PET_* and AEGIS_*.

    UsageError for whatever can't be used; SystemExit(0) after printing the help. As torchrun does, it makes
    the log directory and sets OMP_NUM_THREADS=1 when a node has several ranks, but only once all is well.
    `passes_local_rank`: the script gets --local-rank=N, as from torch.distributed.launch.
    """
    parser = make_parser(passes_local_rank=passes_local_rank)
    args = parser.parse_args(list(argv))
    resolve_environment(parser, args)

    least, most = validation.node_range(args.nnodes)
    _default_to_allocation(args, most)
    explicit_rank: int | None = args.node_rank
    named = args.rdzv_id if args.rdzv_id not in ("", "none") else os.environ.get("SLURM_JOB_ID", "")
    _validate(args)
    conf = validation.rendezvous_conf(args.rdzv_conf)
    join_timeout_s = validation.conf_seconds(conf, "join_timeout", 600.0)
    last_call_s = validation.conf_seconds(conf, "last_call_timeout", 30.0, zero=True)

    static = args.rdzv_backend == "static" and not args.standalone
    node_rank = _node_rank(explicit_rank, static, most)
    if node_rank is None:
        node_rank = allocation.node_rank()
    endpoint = _endpoint(args, least, most)
    validation.run_id(args.rdzv_id, args.log_dir)
    aegis = _aegis_options(args, endpoint, explicit_rank, join_timeout_s)
    args.nproc_per_node = str(validation.process_count(args.nproc_per_node))
    max_restarts_given = args.max_restarts is not None
    if not max_restarts_given:
        args.max_restarts = MAX_RESTARTS_DEFAULT
    args.node_rank = node_rank or 0

    config, cmd, cmd_args = _torch_config(args)
    return Options(
        torch_args=args,
        config=config,
        cmd=cmd,
        cmd_args=cmd_args,
        endpoint=endpoint,
        job_name=named or f"job-{endpoint.port or uuid.uuid4().hex[:12]}",
        anonymous=not named,
        namespace=args.aegis_namespace,
        node_rank=node_rank,
        max_restarts=args.max_restarts,
        max_restarts_given=max_restarts_given,
        join_timeout_s=join_timeout_s,
        last_call_s=last_call_s,
        aegis=aegis,
    )


def _default_to_allocation(args: argparse.Namespace, most: int) -> None:
    """Under srun, with several nodes and no endpoint given: they meet at the first host of the allocation."""
    named = args.rdzv_endpoint or args.master_port is not None or args.master_addr != LOCAL_ADDRESS
    if named or args.standalone or most == 1:
        return
    step = allocation.allocation()
    if step is not None:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", f"{step.hosts[0]}:{step.port}"


def _validate(args: argparse.Namespace) -> None:
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"cannot use --max-restarts {args.max_restarts}: want 0 or more")
    if not args.aegis_namespace or args.aegis_worker_name == "":
        empty = "--aegis-worker-name" if args.aegis_namespace else "--aegis-namespace"
        raise UsageError(f"cannot use an empty {empty}: want a name")
    validation.std_streams("--tee", args.tee)
    validation.std_streams("--redirects", args.redirects)
    validation.local_ranks(args.local_ranks_filter)
    validation.signal_names(getattr(args, "signals_to_handle", "SIGTERM"))  # torch 2.6 hasn't this flag
    if not args.aegis_explain_flags:  # flags are explained wherever one sits, the script may be elsewhere
        validation.program(args)
    if args.no_python and not getattr(args, "use_env", True):
        raise UsageError("cannot use --no-python without --use-env: a program isn't given --local-rank")
    if args.log_dir and args.log_dir != os.devnull:  # which torch reads as "keep no logs"
        validation.output_directory("--log-dir", Path(args.log_dir).absolute())
    validation.output_directory("--aegis-run-dir", args.aegis_run_dir)
    validation.output_directory("--aegis-state-dir", args.aegis_state_dir)
    validation.output_file("--aegis-report", args.aegis_report)
    validation.secret_file(args.aegis_join_secret_file)


def _node_rank(explicit: int | None, static: bool, most: int) -> int | None:
    # torchrun ignores the node rank of a single node, and scripts pass one.
    if explicit is not None and (explicit < 0 or (static and explicit >= most > 1)):
        wanted = f"0 to {most - 1}, since --nnodes is {most}" if static else "0 or more"
        raise UsageError(f"cannot use --node-rank {explicit}: want {wanted}")
    return 0 if explicit is None and static else explicit


def _endpoint(args: argparse.Namespace, least: int, most: int) -> Endpoint:
    """The endpoint by torchrun's own rules; changes `args` as they do."""
    given: Literal["standalone", "master", "rdzv", "local"] = "rdzv"
    if args.standalone:
        given = "standalone"
    elif args.rdzv_backend == "static" and not args.rdzv_endpoint:
        given = "local" if args.master_port is None and most == 1 else "master"
    if given in ("standalone", "local"):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.rdzv_backend not in _BACKENDS:
        raise UsageError(
            f"cannot use --rdzv-backend {args.rdzv_backend!r}: aegis-run brings its own control plane to the "
            f"endpoint; want one of {', '.join(_BACKENDS)}"
        )
    if args.master_port is None:
        args.master_port = STATIC_PORT
    if given == "master" and not args.master_addr:
        raise UsageError("cannot use an empty --master-addr: want the host name or address of node 0")
    text = f"{args.master_addr}:{args.master_port}" if given == "master" else args.rdzv_endpoint
    flag = "--master-addr and --master-port" if given == "master" else "--rdzv-endpoint"
    try:
        host, port = parse_rendezvous_endpoint(
            text, STATIC_PORT if args.rdzv_backend == "static" else C10D_PORT
        )
    except ValueError as error:
        raise UsageError(f"cannot use {flag} {text!r}: want HOST:PORT with a port of 0 to 65535") from error
    if port == 0 and least > 1:
        named = "--standalone" if given == "standalone" else f"{flag} {text}"
        raise UsageError(
            f"cannot use {named} with --nnodes {args.nnodes}: port 0 means any free port, which the other "
            "nodes can't know; give --rdzv-endpoint HOST:PORT"
        )
    return Endpoint(host, port, given)


def _aegis_options(
    args: argparse.Namespace, endpoint: Endpoint, explicit_rank: int | None, join_timeout_s: float
) -> AegisOptions:
    fallback = args.aegis_fallback_port
    if endpoint.port and (fallback or endpoint.port + 1) in (endpoint.port, 65536):
        raise UsageError(
            f"cannot use {fallback or 65536} as fallback port beside the endpoint's {endpoint.port}: give "
            "another --aegis-fallback-port"
        )
    check_paths = dict(args.aegis_check_path or ())
    if len(check_paths) < len(args.aegis_check_path or ()):
        raise UsageError(
            "cannot use --aegis-check-path: the same kind was given twice; want one directory a kind"
        )
    host = socket.gethostname()
    elsewhere = ("namespace", "check_path", "check_budget", "ckpt_watch", "explain_flags")
    own = {
        name.removeprefix("aegis_"): value
        for name, value in vars(args).items()
        if name.startswith("aegis_")
        and name.removeprefix("aegis_") not in elsewhere
        and not guard.is_ours(name)
    }
    own["worker_name"] = own["worker_name"] or (host if explicit_rank is None else f"{host}-{explicit_rank}")
    own["grace_given"] = own["fault_grace_s"] is not None
    own["fault_grace_s"] = own["fault_grace_s"] if own["grace_given"] else FAULT_GRACE_S
    own["rejoin_timeout_s"] = own["rejoin_timeout_s"] or join_timeout_s
    budgets = {check: seconds for part in args.aegis_check_budget or () for check, seconds in part.items()}
    watched = tuple(args.aegis_ckpt_watch) if args.aegis_ckpt_watch else None
    own["policy"], own["notify"] = guard.read(args, os.environ)
    return AegisOptions(check_paths=check_paths, check_budgets=budgets, ckpt_watch=watched, **own)


def _torch_config(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """The configuration that torch itself makes of its flags."""
    quiet = argparse.Namespace(**vars(args))
    if args.aegis_explain_flags:
        quiet.log_dir = os.devnull  # else torch makes the directory
    if args.rdzv_backend != "static":
        # torch would warn that it ignores the node rank; we don't ignore it.
        quiet.node_rank = 0
        quiet.rdzv_endpoint = args.rdzv_endpoint or f"localhost:{C10D_PORT}"
    try:
        return config_from_args(quiet)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(f"cannot use the torchrun flags: {error}") from error
