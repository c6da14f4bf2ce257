"""The checks of this machine: each yields what it found, how bad that is, and what to do about it."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..sizes import size_text
from ..world.launcher import started_by_mpiexec
from . import machine
from .finding import Finding
from .machine import OPTIONAL, Interface, LaunchedRun

TORCH = (2, 11)  # the oldest that the project supports, as pyproject.toml has it
MIB = 1 << 20
RANK_BYTES = 512 * MIB  # python, torch and a small network
FEW_FILES, FILES_A_PEER = 1024, 8  # every process group of a rank holds a connection to each of its peers
SMALL_SHARED = 512 * MIB  # containers often have 64 MiB, which workers of a DataLoader soon fill
RANKS, SIZES = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
NUMBERS = (*RANKS, *SIZES, "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")
NEEDED = {"WORLD_SIZE": "the number of ranks", "MASTER_ADDR": "rank 0's host", "MASTER_PORT": "a free port there"}

Check = Iterator[Finding]


def check_software(versions: Mapping[str, str | None], backends: Mapping[str, bool], gpus: int) -> Check:
    for name in ("python", "halocline", "numpy"):
        yield Finding("software", name, "ok", versions[name] or "")
    torch, oldest = versions["torch"] or "", ".".join(map(str, TORCH))
    text = f"{torch} ({oldest} or newer is needed)"
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < TORCH:
        yield Finding("software", "torch", "problem", text, f"install a newer one: pip install 'torch>={oldest}'")
    else:
        yield Finding("software", "torch", "ok", text)
    present = ", ".join(f"{name} {versions[name]}" for name in OPTIONAL if versions[name])
    absent = ", ".join(f"{name} ({use})" for name, use in OPTIONAL.items() if not versions[name])
    text = f"installed: {present or 'none'}; not installed: {absent or 'none'}"
    yield Finding("software", "optional packages", "ok", text)
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    if not backends["gloo"]:
        remedy = "install a torch with torch.distributed and gloo: the wheels of pytorch.org for Linux have both"
        yield Finding("software", "backends", "problem", text, remedy)
    elif gpus and not backends["nccl"]:
        remedy = "install a CUDA build of torch that has NCCL, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        yield Finding("software", "backends", "problem", f"{text}; ranks with a GPU each talk over nccl", remedy)
    else:
        yield Finding("software", "backends", "ok", text)
    yield check_mpi(versions["mpi4py"])


def check_mpi(version: str | None) -> Finding:
    """Ranks over MPI need an MPI that several threads may call."""
    if version is None:
        return Finding("software", "MPI", "ok", "mpi4py is not installed; ranks talk over torch.distributed")
    library, level, error = machine.ask_mpi()
    if error:
        remedy = "pip install mpich, or load the machine's MPI; without it ranks talk over torch.distributed"
        return Finding("software", "MPI", "warning", f"mpi4py {version} finds no MPI that starts: {error}", remedy)
    text = f"{library} (mpi4py {version}), thread level {level}"
    if level == "multiple":
        return Finding("software", "MPI", "ok", text)
    remedy = "use an MPI that was built with the thread level 'multiple', or start the ranks with torchrun"
    return Finding("software", "MPI", "warning", f"{text}; ranks over MPI need 'multiple'", remedy)


def check_devices(has: Mapping[str, Any], omp: str | None, ranks: int, world: int, launched: bool) -> Check:
    """For ``ranks`` on this machine of ``world`` in all; ``omp`` is OMP_NUM_THREADS. Sizes in bytes."""
    cores, gpus = has["cores"], has["gpus"]
    yield Finding("devices", "cores", "ok", f"{cores} of {has['machine_cores']} for this process")
    threads, remedy = has["threads"], f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    if omp is not None and not omp.isdigit():
        yield Finding("devices", "threads", "warning", f"OMP_NUM_THREADS={omp} is no number", remedy)
    elif omp is None and not launched:
        text = f"OMP_NUM_THREADS is not set: for {ranks} ranks on this machine, {remedy}"
        yield Finding("devices", "threads", "ok", text)
    elif threads * (1 if launched else ranks) > cores:  # ranks of one machine are added up when they meet
        text = f"{threads} a rank, on {cores} cores: they will wait for each other"
        yield Finding("devices", "threads", "warning", text, remedy)
    else:
        yield Finding("devices", "threads", "ok", f"{threads} a rank, on {cores} cores")
    free = has["memory_available_bytes"]
    text = f"{size_text(has['memory_bytes'] or free)}, of which {size_text(free)} are free"
    if free < ranks * RANK_BYTES:
        remedy = f"end other programs or start fewer ranks: each takes {RANK_BYTES // MIB} MiB before its first tensor"
        yield Finding("devices", "memory", "warning", f"{text}: little for {ranks} ranks", remedy)
    else:
        yield Finding("devices", "memory", "ok", text)
    if gpus or not has["gpu_files"]:
        each = ", ".join(f"{one['name']} with {size_text(one['memory_bytes'])}" for one in gpus)
        text = f"{each}; CUDA {has['cuda']}, NCCL {has['nccl']}" if gpus else "none: ranks run on the CPU"
        yield Finding("devices", "GPUs", "ok", text)
    else:
        text = f"{has['gpu_files']}, but torch ({has['cuda'] or 'built without CUDA'}) can use none"
        remedy = "install a CUDA build of torch; see whether nvidia-smi works and what CUDA_VISIBLE_DEVICES says"
        yield Finding("devices", "GPUs", "warning", text, remedy)
    files, wanted = has["open_files"], max(FEW_FILES, FILES_A_PEER * world)
    if files is not None and files < wanted:
        remedy = f"ulimit -n {max(wanted, 65536)}, in the shell or script that starts the ranks"
        yield Finding("devices", "open files", "warning", f"at most {files}; {wanted} are wanted", remedy)
    shared = has["shared_memory_bytes"]
    if shared is not None and shared < SMALL_SHARED:
        text = f"/dev/shm has {shared // MIB} MiB, too little for the workers of a DataLoader"
        remedy = "start the container with more, such as docker run --shm-size=8g, or with --ipc=host"
        yield Finding("devices", "shared memory", "warning", text, remedy)


def check_network(interfaces: Sequence[Interface], env: Mapping[str, str], host: str) -> Check:
    """``interfaces`` is empty where the system does not list them."""
    address, every = machine.resolve(host), ", ".join(map(str, interfaces))
    usable = [one for one in interfaces if one.usable]
    if interfaces and not usable:
        remedy = "bring one up with an address, such as: ip link set lo up"
        yield Finding("network", "interfaces", "problem", f"none is up: {every}", remedy)
    else:
        yield Finding("network", "interfaces", "ok", every or "this system does not list them")
    if address is None:
        remedy = f"add a line with this machine's address and {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield Finding("network", "host name", "warning", f"{host} has no address: gloo falls back to loopback", remedy)
    else:
        yield Finding("network", "host name", "ok", f"{host} is {address}")
    choice = " or ".join(one.name for one in usable) or "one that you bring up"
    gloo, nccl = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if wrong := _not_usable(gloo, interfaces):
        remedy = f"export GLOO_SOCKET_IFNAME={choice}, or unset GLOO_SOCKET_IFNAME"
        text = f"GLOO_SOCKET_IFNAME names {wrong}; there are {every}"
        yield Finding("network", "gloo interface", "problem", text, remedy)
    elif gloo:
        yield Finding("network", "gloo interface", "ok", f"{gloo}, as GLOO_SOCKET_IFNAME says")
    elif address is None or machine.is_loopback(address):
        outer = next((one.name for one in usable if not one.loopback), "the one they share")
        text = f"loopback, by the host name: enough for this machine; for several, export GLOO_SOCKET_IFNAME={outer}"
        yield Finding("network", "gloo interface", "ok", text)
    else:
        name = next((one.name for one in interfaces if one.address == address), "an interface")
        yield Finding("network", "gloo interface", "ok", f"{name} ({address}), by the host name")
    if nccl and interfaces and not any(_nccl_takes(one.name, nccl) for one in usable):
        remedy = f"export NCCL_SOCKET_IFNAME={choice}, or unset NCCL_SOCKET_IFNAME"
        text = f"NCCL_SOCKET_IFNAME={nccl} leaves no interface that is up; there are {every}"
        yield Finding("network", "nccl interface", "problem", text, remedy)


def _not_usable(gloo: str, interfaces: Sequence[Interface]) -> str:
    """The first name that will not do, and why. Gloo takes exact names between commas, and trims nothing."""
    by_name = {one.name: one for one in interfaces}
    for name in gloo.split(",") if gloo and by_name else ():
        one = by_name.get(name)
        if one is None or not one.usable:
            return f"{name!r}, which {'is not there' if one is None else 'has no address' if one.up else 'is down'}"
    return ""


def _nccl_takes(name: str, setting: str) -> bool:
    """NCCL takes prefixes of names between commas; '=' makes them whole names, '^' excludes them."""
    exclude = setting.startswith("^")
    exact = setting[exclude:].startswith("=")
    words = setting[exclude + exact :].split(",")
    return any(name == word if exact else name.startswith(word) for word in words) is not exclude


def contradictions(env: Mapping[str, str]) -> Check:
    """Variables of launchers that cannot be as they are: with one of them, joining the ranks would fail or hang."""
    rubbish = [name for name in NUMBERS if not env.get(name, "0").isdigit()]
    if rubbish:
        text = ", ".join(f"{name}={env[name]}" for name in rubbish)
        yield _launch_problem("environment", f"{text}: numbers from 0 are needed", f"unset {' '.join(rubbish)}")
    elif "RANK" in env:
        if missing := [name for name in NEEDED if name not in env]:
            settings = ", ".join(f"{name} to {NEEDED[name]}" for name in missing)
            remedy = f"start with torchrun, which sets them all; or set {settings}; or unset RANK for a single rank"
            yield _launch_problem("environment", f"RANK={env['RANK']} is set, but not {', '.join(missing)}", remedy)
        for rank, size in zip(RANKS, SIZES, strict=True):
            if rank in env and size in env and int(env[rank]) >= int(env[size]):
                text = f"{rank}={env[rank]} with {size}={env[size]}: ranks count from 0 to {size} - 1"
                yield _launch_problem("environment", text, f"set {size} to the number of ranks, or start with torchrun")


def check_launch(run: LaunchedRun, env: Mapping[str, str], gpus: int) -> Check:
    where = run.meeting
    if run.by:
        text = f"{run.by}: rank {run.rank} of {run.size}; they meet at {where.address}:{where.port}"
    elif started_by_mpiexec(env):
        text = "a launcher of MPI: scripts join over MPI; the doctor examines links under torchrun and Slurm"
    else:
        text = "none: RANK and SLURM_PROCID are not set, so that a script would run as a single rank"
    yield Finding("launch", "launcher", "ok", text)
    if not run.by and (why := _why_not(free_port)):
        remedy = "end programs that hold ports (ss -tlnp lists them), or raise ulimit -n if files have run out"
        yield _launch_problem("free port", f"none can be had: {why}", remedy)
    if run.by and machine.resolve(where.address) is None:
        remedy = "set MASTER_ADDR to a name or an address of rank 0's machine that this machine knows"
        yield _launch_problem("meeting point", f"MASTER_ADDR={where.address} has no address here", remedy)
    port = int(env.get("MASTER_PORT", "1"))
    other = "choose another port" if _why_not(free_port) else f"export MASTER_PORT={free_port()}, which is free,"
    if not 0 < port < 65536:
        yield _launch_problem("MASTER_PORT", f"{port} is no port: they go from 1 to 65535", f"{other} for all ranks")
    elif "MASTER_PORT" in env and run.rank == 0 and not where.served and (why := _why_not(lambda: _bind(port))):
        yield _launch_problem("MASTER_PORT", f"{port} cannot be had: {why}", f"end it, or {other} for all ranks")
    exported = "TORCHELASTIC_RUN_ID" not in env and env.get("WORLD_SIZE") == env.get("SLURM_NTASKS")
    if run.by and exported and env["RANK"] != env.get("SLURM_PROCID", env["RANK"]):  # one RANK for all tasks
        remedy = "unset RANK and WORLD_SIZE in the batch script; they are then taken from Slurm"
        text = f"RANK={env['RANK']}, but Slurm calls this task {env['SLURM_PROCID']}"
        yield Finding("launch", "environment", "warning", text, remedy)
    if run.by and gpus and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(env):
        text = "LOCAL_RANK or LOCAL_WORLD_SIZE is not set: every rank would take GPU 0"
        remedy = "start with torchrun, or set both to the rank's place among those of its machine"
        yield Finding("launch", "environment", "warning", text, remedy)


def _launch_problem(name: str, text: str, remedy: str) -> Finding:
    return Finding("launch", name, "problem", text, remedy)


def free_port() -> int:
    """A port that nobody holds now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _bind(port: int) -> None:
    """As the store of rank 0 does. Nothing is listened to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def _why_not(take: Callable[[], object]) -> str:
    try:
        take()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return "another program holds it (ss -tlnp shows which)" if taken else error.strerror or str(error)
    return ""
