"""The secret of a job: ranks believe only those peers that prove to know it.

It comes from the environment (``HALOCLINE_SECRET``), from a file that ``HALOCLINE_SECRET_FILE`` names, or from a file
that this user's ranks make in the home folder. It never travels: a peer shows a keyed hash (HMAC-SHA256).
Any process may read and write the store at which ranks meet, so the secret is never kept there.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import MeshError
from .rendezvous import BoundedStore

SECRET, SECRET_FILE = "HALOCLINE_SECRET", "HALOCLINE_SECRET_FILE"
PROOF_SIZE = 32  # bytes of a proof
_LEAST = 16  # characters of a secret
_MOST = 4096  # bytes read of a file


@dataclass(frozen=True)
class Secret:
    """A job's secret. ``chosen``: the environment names it, so that a run without it would be a mistake."""

    key: bytes = field(repr=False)
    chosen: bool = True

    def proof(self, *facts: object) -> bytes:
        """A keyed hash of these facts, which only a process that knows the secret can compute."""
        text = "".join(f"{len(words)}:{words}" for words in map(str, facts))  # no two lists of facts have one text
        return hmac.digest(self.key, text.encode(), "sha256")

    def proves(self, proof: bytes, *facts: object) -> bool:
        """Is it the proof of these facts? Takes the same time whatever is wrong with it."""
        return hmac.compare_digest(proof, self.proof(*facts))


def new_secret() -> str:
    """A new random secret, for a launcher that passes it to its ranks in their environment."""
    return secrets.token_hex(32)


def find_secret(environment: Mapping[str, str]) -> Secret | None:
    """The secret by the environment or the user's own file, which is made if it is missing; None if it cannot be.

    MeshError if the environment names one that is too short, or a file that others can read.
    """
    if text := environment.get(SECRET, ""):
        return Secret(_checked(text, SECRET))
    if path := environment.get(SECRET_FILE, ""):
        try:
            return Secret(_checked(_read_private(Path(path)), path))
        except OSError as error:
            raise MeshError(f"{SECRET_FILE}={path}: {error.strerror}; give a file that every rank can read") from None
    return user_secret(environment)


def _checked(text: str, where: str) -> bytes:
    """The key, or MeshError if the secret could be guessed."""
    if len(text.strip()) < _LEAST:
        raise MeshError(
            f"the secret in {where} has less than {_LEAST} characters; make one with `openssl rand -hex 32`"
        )
    return text.strip().encode()


def _read_private(path: Path) -> str:
    """The content of a file that belongs to this user and that nobody else can read; else MeshError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise MeshError(f"the secret in {path} must be a file of this user that others cannot read: chmod 600 it")
        return file.read(_MOST).decode(errors="replace")


def user_secret(environment: Mapping[str, str]) -> Secret | None:
    """The secret in this user's home folder, made by the first rank that needs it; None without such a folder."""
    home = environment.get("XDG_STATE_HOME") or (f"{environment['HOME']}/.local/state" if "HOME" in environment else "")
    path = Path(home) / "halocline" / "secret"
    if not path.is_absolute():
        return None
    try:
        if not path.exists():
            _make(path)
        return Secret(_checked(_read_private(path), str(path)), chosen=False)
    except OSError:  # no home folder, or one that cannot be written
        return None


def _make(path: Path) -> None:
    """Write a new secret under its name, complete; if another rank has done so meanwhile, its secret stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".secret-{secrets.token_hex(8)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(new_secret())
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


# ---- do all ranks know the same one? ----

_DIFFERS, _CHOSEN = 1 << 20, 1 << 40  # in the sum of all ranks' answers: how many differ, how many were chosen
_NO_SECRET = (
    "the ranks share no secret, so they open no ports of their own and gloo carries all messages: slower, and a rank "
    f"on another path is noticed at the deadline only; give all ranks the same {SECRET}, or a file of mode 0600 as "
    f"{SECRET_FILE}"
)


def agree_on_secret(
    environment: Mapping[str, str], rank: int, size: int, store: BoundedStore, name: str
) -> Secret | None:
    """This rank's secret if all ranks have the same; else None, with a warning on rank 0. By all ranks together.

    Ranks compare proofs, never the secret. MeshError, on all ranks, if they differ and an environment names one.
    """
    problem: MeshError | None = None
    try:
        own = find_secret(environment)
    except MeshError as error:  # the others hear of it first: they wait for this rank's answer
        own, problem = Secret(secrets.token_bytes(PROOF_SIZE)), error
    verdict = _verdict(own, rank, size, store, name)
    if problem is not None:
        raise problem
    if verdict == "same":
        return own
    if verdict == "chosen" or (own is not None and own.chosen):
        raise MeshError(
            f"rank {rank}, joining: the ranks have different secrets; give all of them the same {SECRET}, or the same "
            f"file as {SECRET_FILE}"
        )
    if rank == 0:
        warnings.warn(_NO_SECRET, RuntimeWarning, stacklevel=2)
    return None


def _verdict(own: Secret | None, rank: int, size: int, store: BoundedStore, name: str) -> str:
    """ "same" if all ranks have this rank's secret, "chosen" if not though an environment names one, else "none"."""
    fact = "the same secret"
    if rank == 0:
        store.set(f"{name}/proof", "none" if own is None else own.proof(fact, name).hex())
    same = own is not None and own.proves(from_hex(store.get(f"{name}/proof")), fact, name)
    answer = 1 + (0 if same else _DIFFERS) + (_CHOSEN if own is not None and own.chosen else 0)
    total = store.add(f"{name}/answers", answer)
    if total % _DIFFERS == size:  # the last one decides for all
        differ, chosen = total // _DIFFERS % _DIFFERS, total // _CHOSEN
        store.set(f"{name}/verdict", "none" if differ and not chosen else "chosen" if differ else "same")
    verdict = store.get(f"{name}/verdict")
    return verdict if same or verdict != "same" else "chosen"


def from_hex(text: str) -> bytes:
    """Bytes from hexadecimal digits; empty, which proves nothing, where it is something else."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
