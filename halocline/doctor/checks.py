"""The checks of this machine: each yields findings, with what was found, how bad that is, and what to do.

Checks are functions of facts that ``machine`` has collected and of environment variables, so that tests can give them
any machine.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..sizes import size_text
from ..world.launcher import RankInfo, rendezvous_of, started_by_mpiexec
from ..world.rendezvous import is_loopback
from . import machine
from .finding import Finding, judged, problem_if, warn_if
from .machine import OPTIONAL, Interface

TORCH = (2, 11)  # the oldest that the project supports, as pyproject.toml has it
MIB = 1 << 20
RANK_BYTES = 512 * MIB  # memory of a rank: Python, torch and a small network
FEW_FILES, FILES_A_PEER = 1024, 8  # open files: every process group of a rank has a connection to each of its peers
SMALL_SHARED = 512 * MIB  # of /dev/shm: containers often have 64 MiB, which workers of a DataLoader soon fill
RANKS, SIZES = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
NUMBERS = (*RANKS, *SIZES, "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")
NEEDED = {"WORLD_SIZE": "the number of ranks", "MASTER_ADDR": "rank 0's host", "MASTER_PORT": "a free port there"}

Check = Iterator[Finding]
_launch_problem = partial(Finding, "launch", status="problem")


def check_software(versions: Mapping[str, str | None], backends: Mapping[str, bool], gpus: int) -> Check:
    """Check versions (None: not installed) and the backends of torch.distributed, for this number of GPUs.

    A torch that is too old, or without gloo, is a problem; so are GPUs without NCCL, since ranks with a GPU each use
    it.
    """
    judge = partial(judged, "software")
    for name in ("python", "halocline", "numpy"):
        yield judge(name, versions[name] or "")
    torch, oldest = versions["torch"] or "", ".".join(map(str, TORCH))
    text, too_old = f"{torch} ({oldest} or newer is needed)", [int(n) for n in re.findall(r"\d+", torch)[:2]] < [*TORCH]
    yield judge("torch", text, problem_if(too_old, text, f"install a newer one: pip install 'torch>={oldest}'"))
    present = ", ".join(f"{name} {versions[name]}" for name in OPTIONAL if versions[name])
    absent = ", ".join(f"{name} ({use})" for name, use in OPTIONAL.items() if not versions[name])
    yield judge("optional packages", f"installed: {present or 'none'}; not installed: {absent or 'none'}")
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    remedy = "install a torch with torch.distributed and gloo: the wheels of pytorch.org for Linux have both"
    over_nccl = f"{text}; ranks with a GPU each talk over nccl"
    hide = "install a CUDA build of torch that has NCCL, or hide the GPUs with CUDA_VISIBLE_DEVICES="
    lacks_nccl = gpus and not backends["nccl"]
    faults = problem_if(not backends["gloo"], text, remedy), problem_if(lacks_nccl, over_nccl, hide)
    yield judge("backends", text, *faults)
    yield check_mpi(versions["mpi4py"])


def check_mpi(version: str | None) -> Finding:
    """Check that the MPI library under mpi4py starts, and that several threads may call it, as ranks over MPI need."""
    if version is None:
        return Finding("software", "MPI", "ok", "mpi4py is not installed; ranks talk over torch.distributed")
    library, level, error = machine.ask_mpi()
    text = f"{library} (mpi4py {version}), thread level {level}"
    install = "pip install mpich, or load the machine's MPI; without it ranks talk over torch.distributed"
    other = "use an MPI that was built with the thread level 'multiple', or start the ranks with torchrun"
    absent, single = f"mpi4py {version} finds no MPI that starts: {error}", f"{text}; ranks over MPI need 'multiple'"
    faults = warn_if(error, absent, install), warn_if(level != "multiple", single, other)
    return judged("software", "MPI", text, *faults)


def check_devices(has: Mapping[str, Any], omp: str | None, ranks: int, world: int, launched: bool) -> Check:
    """Check cores, threads, memory, GPUs and limits, for ``ranks`` on this machine of ``world`` in all.

    ``has`` is from ``machine.devices()``, with sizes in bytes; ``omp`` is OMP_NUM_THREADS. ``launched``: this process
    is one of the ranks.
    """
    judge = partial(judged, "devices")
    cores, gpus, threads = has["cores"], has["gpus"], has["threads"]
    yield judge("cores", f"{cores} of {has['machine_cores']} for this process")
    remedy, text = f"export OMP_NUM_THREADS={max(1, cores // ranks)}", f"{threads} a rank, on {cores} cores"
    if omp is None and not launched:
        text = "OMP_NUM_THREADS is not set; commands that start ranks themselves (--ranks) set it to 1 for them"
        told = f"for {ranks} ranks of torchrun, srun or mpiexec on this machine: {remedy}"
        yield Finding("devices", "threads", "hint", text, told)
    else:
        odd = omp is not None and not omp.isdigit()
        crowded = (
            threads * (1 if launched else ranks) > cores
        )  # launched ranks of a machine are added up in ``compare``
        wrong = warn_if(odd, f"OMP_NUM_THREADS={omp} is no number", remedy)
        yield judge("threads", text, wrong, warn_if(crowded, f"{text}: they will wait for each other", remedy))
    free = has["memory_available_bytes"]
    text = f"{size_text(has['memory_bytes'] or free)}, of which {size_text(free)} are free"
    remedy = f"end other programs or start fewer ranks: each takes {RANK_BYTES // MIB} MiB before its first tensor"
    little = free < ranks * RANK_BYTES
    yield judge("memory", text, warn_if(little, f"{text}: little for {ranks} ranks", remedy))
    each = ", ".join(f"{one['name']} with {size_text(one['memory_bytes'])}" for one in gpus)
    text = f"{each}; CUDA {has['cuda']}, NCCL {has['nccl']}" if gpus else "none: ranks run on the CPU"
    unused = f"{has['gpu_files']}, but torch ({has['cuda'] or 'built without CUDA'}) can use none"
    remedy = "install a CUDA build of torch; see whether nvidia-smi works and what CUDA_VISIBLE_DEVICES says"
    yield judge("GPUs", text, warn_if(has["gpu_files"] and not gpus, unused, remedy))
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
    """Check interfaces, the host name, and the interfaces that gloo and NCCL are told to use.

    ``interfaces`` is empty where the system does not list them; then names cannot be checked. A host name without an
    address is a warning, since gloo falls back to loopback.
    """
    judge = partial(judged, "network")
    address, every = machine.resolve(host), ", ".join(map(str, interfaces))
    usable = [one for one in interfaces if one.usable]
    remedy, all_down = "bring one up with an address, such as: ip link set lo up", interfaces and not usable
    well = every or "this system does not list them"
    yield judge("interfaces", well, problem_if(all_down, f"none is up: {every}", remedy))
    remedy = f"add a line with this machine's address and {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    unknown = f"{host} has no address: gloo falls back to loopback"
    yield judge("host name", f"{host} is {address}", warn_if(address is None, unknown, remedy))
    choice = " or ".join(one.name for one in usable) or "one that you bring up"
    gloo, nccl = env.get("GLOO_SOCKET_IFNAME", ""), env.get("NCCL_SOCKET_IFNAME", "")
    if gloo:
        text = f"{gloo}, as GLOO_SOCKET_IFNAME says"
    elif address is None or is_loopback(address):
        outer = next((one.name for one in usable if not one.loopback), "the one they share")
        text = f"loopback, by the host name: enough for this machine; for several, export GLOO_SOCKET_IFNAME={outer}"
    else:
        name = next((one.name for one in interfaces if one.address == address), "an interface")
        text = f"{name} ({address}), by the host name"
    wrong = _not_usable(gloo, interfaces)
    found = f"GLOO_SOCKET_IFNAME names {wrong}; there are {every}"
    remedy = f"export GLOO_SOCKET_IFNAME={choice}, or unset GLOO_SOCKET_IFNAME"
    yield judge("gloo interface", text, problem_if(wrong, found, remedy))
    if nccl and interfaces and not any(_nccl_takes(one.name, nccl) for one in usable):
        remedy = f"export NCCL_SOCKET_IFNAME={choice}, or unset NCCL_SOCKET_IFNAME"
        text = f"NCCL_SOCKET_IFNAME={nccl} leaves no interface that is up; there are {every}"
        yield Finding("network", "nccl interface", "problem", text, remedy)


def _not_usable(gloo: str, interfaces: Sequence[Interface]) -> str:
    """The first interface name that gloo cannot use, and why; "" if there is none. Gloo takes exact names between
    commas, and does not trim blanks."""
    by_name = {one.name: one for one in interfaces}
    for name in gloo.split(",") if gloo and by_name else ():
        one = by_name.get(name)
        if one is None or not one.usable:
            return f"{name!r}, which {'is not there' if one is None else 'has no address' if one.up else 'is down'}"
    return ""


def _nccl_takes(name: str, setting: str) -> bool:
    """Would NCCL use this interface? Its setting has prefixes of names between commas; a leading "=" makes them whole
    names, "^" excludes them."""
    exclude = setting.startswith("^")
    exact = setting[exclude:].startswith("=")
    words = setting[exclude + exact :].split(",")
    return any(name == word if exact else name.startswith(word) for word in words) is not exclude


def contradictions(env: Mapping[str, str]) -> Check:
    """Variables of launchers that contradict each other: with one of them, joining the ranks would fail or hang.

    These are values that are no numbers, a RANK without the variables that go with it, and ranks beyond their number.
    """
    rubbish = [name for name in NUMBERS if not env.get(name, "0").isdigit()]
    if rubbish:
        text = ", ".join(f"{name}={env[name]}" for name in rubbish)
        remedy = f"unset {' '.join(rubbish)}"
        yield _launch_problem("environment", found=f"{text}: numbers from 0 are needed", remedy=remedy)
    elif "RANK" in env:
        if missing := [name for name in NEEDED if name not in env]:
            settings = ", ".join(f"{name} to {NEEDED[name]}" for name in missing)
            remedy = f"start with torchrun, which sets them all; or set {settings}; or unset RANK for a single rank"
            text = f"RANK={env['RANK']} is set, but not {', '.join(missing)}"
            yield _launch_problem("environment", found=text, remedy=remedy)
        for rank, size in zip(RANKS, SIZES, strict=True):
            if rank in env and size in env and int(env[rank]) >= int(env[size]):
                text = f"{rank}={env[rank]} with {size}={env[size]}: ranks count from 0 to {size} - 1"
                remedy = f"set {size} to the number of ranks, or start with torchrun"
                yield _launch_problem("environment", found=text, remedy=remedy)


def check_launch(run: RankInfo | None, env: Mapping[str, str], gpus: int) -> Check:
    """Check how this process was started, and the address and port at which ranks meet.

    ``run`` is None if neither torchrun nor Slurm started it. Only rank 0, or a process alone, tries the port: for other
    ranks it must be taken. Variables that give several tasks the same rank, or every rank the same GPU, are a warning.
    """
    where = rendezvous_of(env)
    if run:
        by = "torchrun's variables" if run.by == "torchrun" else run.by
        text = f"{by}: rank {run.rank} of {run.size}; they meet at {where.address}:{where.port}"
    elif started_by_mpiexec(env):
        text = "a launcher of MPI: scripts join over MPI; the doctor examines links under torchrun and Slurm"
    else:
        text = "none: RANK and SLURM_PROCID are not set, so that a script would run as a single rank"
    yield Finding("launch", "launcher", "ok", text)
    no_port = _why_not(free_port)
    if not run and no_port:
        remedy = "end programs that hold ports (ss -tlnp lists them), or raise ulimit -n if files have run out"
        yield _launch_problem("free port", found=f"none can be had: {no_port}", remedy=remedy)
    if run and machine.resolve(where.address) is None:
        remedy = "set MASTER_ADDR to a name or an address of rank 0's machine that this machine knows"
        yield _launch_problem("meeting point", found=f"MASTER_ADDR={where.address} has no address here", remedy=remedy)
    port = int(env.get("MASTER_PORT", "1"))
    other = "choose another port" if no_port else f"export MASTER_PORT={free_port()}, which is free,"
    is_first = "MASTER_PORT" in env and (run is None or run.rank == 0) and not where.served
    if not 0 < port < 65536:
        text = f"{port} is no port: they go from 1 to 65535"
        yield _launch_problem("MASTER_PORT", found=text, remedy=f"{other} for all ranks")
    elif is_first and (why := _why_not(lambda: _bind(port))):
        text, remedy = f"{port} cannot be had: {why}", f"end it, or {other} for all ranks"
        yield _launch_problem("MASTER_PORT", found=text, remedy=remedy)
    exported = "TORCHELASTIC_RUN_ID" not in env and env.get("WORLD_SIZE") == env.get("SLURM_NTASKS")
    # A batch script that exports RANK gives all tasks the same one.
    if run and exported and env["RANK"] != env.get("SLURM_PROCID", env["RANK"]):
        remedy = "unset RANK and WORLD_SIZE in the batch script; they are then taken from Slurm"
        text = f"RANK={env['RANK']}, but Slurm calls this task {env['SLURM_PROCID']}"
        yield Finding("launch", "environment", "warning", text, remedy)
    if run and gpus and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(env):
        text = "LOCAL_RANK or LOCAL_WORLD_SIZE is not set: every rank would take GPU 0"
        remedy = "start with torchrun, or set both to the rank's place among those of its machine"
        yield Finding("launch", "environment", "warning", text, remedy)


def free_port() -> int:
    """A port of this machine that no program holds now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _bind(port: int) -> None:
    """Bind a port as the store of rank 0 does, without listening."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def _why_not(take: Callable[[], object]) -> str:
    """Why a port cannot be taken, by calling ``take``; "" if it can."""
    try:
        take()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return "another program holds it (ss -tlnp shows which)" if taken else error.strerror or str(error)
    return ""
