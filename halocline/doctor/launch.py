"""What torchrun or Slurm says of the run, whether it makes sense, and whether its port can be had."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..world.launcher import adopt_environment, started_by_mpiexec
from .finding import Finding
from .network import resolve

TOPIC = "launch"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
NUMBERS = (*TORCHRUN, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")


@dataclass(frozen=True)
class DoctorLaunch:
    """This process among the ranks of its run; a run of one where nobody started more."""

    by: str = ""  # torchrun or Slurm
    rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    held: bool = False  # the port is that of a store which torchrun itself keeps


def launched(env: Mapping[str, str]) -> bool:
    """Does the environment say that this is a rank? Even one that says it badly."""
    slurm = "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1"
    return "RANK" in env or slurm


def contradictions(env: Mapping[str, str]) -> list[Finding]:
    """What in the environment cannot be as it is. With any of it, joining the ranks would fail or hang."""
    rubbish = [name for name in NUMBERS if name in env and not env[name].isdigit()]
    if rubbish:
        text = ", ".join(f"{name}={env[name]}" for name in rubbish)
        return [_problem("environment", f"{text}: numbers from 0 are needed", f"unset {' '.join(rubbish)}, or mend it")]
    if "RANK" not in env:
        return []
    return [*_missing(env), *_too_large(env, "RANK", "WORLD_SIZE"), *_too_large(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


def read_launch() -> DoctorLaunch:
    """From the environment as the library reads it, which for Slurm puts torchrun's names there."""
    env, by = os.environ, "torchrun's variables" if "RANK" in os.environ else "Slurm"
    if not launched(env) or not adopt_environment():
        return DoctorLaunch()
    return DoctorLaunch(
        by=by,
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        held=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def examine_launch(launch: DoctorLaunch, env: Mapping[str, str], gpus: int) -> list[Finding]:
    if not launch.by:
        text = "none: RANK and SLURM_PROCID are not set, so that a script would run as a single rank"
        if started_by_mpiexec(env):
            text = "a launcher of MPI: scripts join over MPI; links between ranks are examined under torchrun and Slurm"
        return [Finding(TOPIC, "launcher", "ok", text), _free_port(), *_chosen_port(env, serve=True)]
    text = f"{launch.by}: rank {launch.rank} of {launch.size}; they meet at {launch.address}:{launch.port}"
    return [
        Finding(TOPIC, "launcher", "ok", text),
        *_address(launch.address),
        *_chosen_port(env, serve=launch.rank == 0 and not launch.held),
        *_exported_rank(env),
        *(_no_local_rank(env) if gpus else ()),
    ]


def _problem(name: str, found: str, remedy: str) -> Finding:
    return Finding(TOPIC, name, "problem", found, remedy)


def _missing(env: Mapping[str, str]) -> list[Finding]:
    names = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if not names:
        return []
    values = {
        "WORLD_SIZE": "the number of ranks",
        "MASTER_ADDR": "the host of rank 0",
        "MASTER_PORT": "a free port there",
    }
    settings = ", ".join(f"{name} to {values[name]}" for name in names)
    remedy = f"start with torchrun, which sets them all; or set {settings}; or unset RANK for a single rank"
    return [_problem("environment", f"RANK={env['RANK']} is set, but not {', '.join(names)}", remedy)]


def _too_large(env: Mapping[str, str], rank: str, size: str) -> list[Finding]:
    if rank not in env or size not in env or int(env[rank]) < int(env[size]):
        return []
    text = f"{rank}={env[rank]} with {size}={env[size]}: ranks count from 0 to {size} - 1"
    return [_problem("environment", text, f"set {size} to the number of ranks, or start with torchrun")]


def _address(address: str) -> list[Finding]:
    if resolve(address) is not None:
        return []
    remedy = "set MASTER_ADDR to a name or an address of rank 0's machine that this machine knows"
    return [_problem("meeting point", f"MASTER_ADDR={address} has no address here", remedy)]


def _exported_rank(env: Mapping[str, str]) -> list[Finding]:
    """A RANK exported in a batch script is the same for all tasks, and the ranks then wait for each other for ever."""
    by_torchrun, task = "TORCHELASTIC_RUN_ID" in env, env.get("SLURM_PROCID", env["RANK"])
    if by_torchrun or env["WORLD_SIZE"] != env.get("SLURM_NTASKS") or task == env["RANK"]:
        return []
    text = f"RANK={env['RANK']}, but Slurm calls this task {task}"
    remedy = "unset RANK and WORLD_SIZE in the batch script; they are then taken from Slurm"
    return [Finding(TOPIC, "environment", "warning", text, remedy)]


def _no_local_rank(env: Mapping[str, str]) -> list[Finding]:
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in env]
    if not missing:
        return []
    text = f"{' and '.join(missing)} not set: every rank would take GPU 0"
    remedy = (
        "start with torchrun, or set LOCAL_RANK and LOCAL_WORLD_SIZE to the rank's place among those of its machine"
    )
    return [Finding(TOPIC, "environment", "warning", text, remedy)]


# ---- ports ----


def free_port() -> int:
    """One that nobody holds now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _free_port() -> Finding:
    try:
        port = free_port()
    except OSError as error:
        remedy = "end programs that hold ports (ss -tlnp lists them), or raise ulimit -n if files have run out"
        return _problem("free port", f"none can be had: {error.strerror}", remedy)
    return Finding(TOPIC, "free port", "ok", f"can be had, such as {port}")


def _chosen_port(env: Mapping[str, str], serve: bool) -> list[Finding]:
    """``serve``: the store at that port will be this process's."""
    setting = env.get("MASTER_PORT")
    if setting is None:
        return []
    if not 0 < int(setting) < 65536:
        return [_problem("MASTER_PORT", f"{setting} is no port: they go from 1 to 65535", _other_port())]
    return [_taken_or_free(int(setting))] if serve else []


def _taken_or_free(port: int) -> Finding:
    try:
        _bind(port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another program holds it (ss -tlnp shows which)" if taken else error.strerror
        return _problem("MASTER_PORT", f"{port} cannot be had: {why}", _other_port("end it, or " if taken else ""))
    return Finding(TOPIC, "MASTER_PORT", "ok", f"{port} is free")


def _other_port(first: str = "") -> str:
    try:
        return f"{first}export MASTER_PORT={free_port()}, which is free, for all ranks"
    except OSError:
        return f"{first}choose another port for all ranks"


def _bind(port: int) -> None:
    """As the store of rank 0 does. Nothing is listened to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
