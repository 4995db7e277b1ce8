"""NKeys and JWTs: who may use the bus, as whom, and for how long.

The trust is a chain: the operator key signs the accounts, the account key signs the users, and the server is
given the operator's JWT only. A user authenticates by signing the server's nonce with its own NKey, so a
worker sends only a public key at first contact, and its JWT is worthless to anybody else. No Python package
issues these JWTs, so it is done here (format: JWT v2 with the algorithm `ed25519-nkey`).
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import nkeys
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from aegis_elastic.bus import subjects
from aegis_elastic.bus.errors import BusError

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_FORMAT = 1
_UNLIMITED = -1
_KINDS = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "user": nkeys.PREFIX_BYTE_USER,
}


class NotThisWorker(Exception):
    """A message was not signed by the worker that it names; the text says what is wrong."""


class CredentialsUnreadable(BusError):
    """The machine's fault: the file with the plane's keys is missing, damaged or readable by others."""


class NKey:
    """An ed25519 key pair in NATS's form. The private half is in no attribute, repr or pickle."""

    __slots__ = ("_pair", "public")

    def __init__(self, seed: bytes) -> None:
        """Take the encoded seed (`S...`); ValueError if it is none. Never put the seed into the message."""
        try:
            self._pair: Any = nkeys.from_seed(bytearray(seed))
            self.public: str = self._pair.public_key.decode()
        except Exception:  # noqa: BLE001 - nkeys raises a dozen unrelated types, and their text may hold the seed
            raise ValueError("cannot read an NKey seed: damaged or not a seed") from None

    @classmethod
    def generate(cls, kind: str = "user") -> "NKey":
        """Make a new key; `kind` is operator, account or user."""
        return cls(bytes(nkeys.encode_seed(os.urandom(32), _KINDS[kind])))

    def sign(self, data: bytes) -> bytes:
        """Return the raw 64-byte signature of `data`."""
        return bytes(self._pair.sign(data))

    def _seed(self) -> str:
        return bytes(self._pair.seed).decode()

    def __repr__(self) -> str:
        return f"NKey({self.public})"

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle an NKey: its private half must not leave the process")


@dataclass(frozen=True)
class Credentials:
    """What a connection authenticates with: a user's key and the JWT issued to it."""

    key: NKey
    jwt: str = field(repr=False)

    def renewed(self, jwt: str) -> "Credentials":
        """Return these credentials with a newer JWT."""
        return replace(self, jwt=jwt)


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    operator_seed: str
    account_seed: str
    system_seed: str
    operator_jwt: str
    revocations: dict[str, int]


@dataclass(frozen=True)
class PlaneKeys:
    """The keys of a control plane: operator, the account of all jobs, the server's own system account.

    They are made once and kept in the plane's directory, so that a restarted or re-adopted plane still
    accepts the JWTs that it has issued. The operator's JWT is kept as text, because the server refuses a
    reload with another one. `revocations` maps a user's public key to the wall second up to which JWTs issued
    to it are void.
    """

    operator: NKey
    account: NKey
    system: NKey
    operator_jwt: str = field(repr=False)
    revocations: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def generate(cls) -> "PlaneKeys":
        """Make the keys of a new plane."""
        operator, account, system = (NKey.generate(kind) for kind in ("operator", "account", "account"))
        claims = {"type": "operator", "version": 2, "system_account": system.public}
        return cls(operator, account, system, _sign(operator, operator.public, "aegis", claims, None))

    @classmethod
    def load_or_generate(cls, path: Path) -> "PlaneKeys":
        """Return the keys in `path`, made and saved there if there is no such file. Errors as `load` and
        `save`.
        """
        if path.exists():
            return cls.load(path)
        keys = cls.generate()
        keys.save(path)
        return keys

    @classmethod
    def load(cls, path: Path) -> "PlaneKeys":
        """Read the keys from `path`; CredentialsUnreadable if that fails or others can read the file too."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                raw = file.read()
        except OSError as error:
            raise CredentialsUnreadable(
                f"cannot read the plane's keys in {path}: {error.strerror}"
            ) from error
        if mode & 0o077:
            raise CredentialsUnreadable(
                f"cannot use the keys in {path}: mode {mode & 0o777:04o}, want 0600 (others can read it)"
            )
        try:
            stored = msgspec.json.decode(raw, type=_KeyFile)
            seeds = (stored.operator_seed, stored.account_seed, stored.system_seed)
            operator, account, system = (NKey(seed.encode()) for seed in seeds)
        except (msgspec.MsgspecError, ValueError):
            # Neither the content nor the decoder's message: both can contain a seed.
            raise CredentialsUnreadable(f"cannot use the plane's keys in {path}: damaged") from None
        if stored.format != _FORMAT:
            raise CredentialsUnreadable(
                f"cannot use the plane's keys in {path}: format {stored.format}, not {_FORMAT}"
            )
        return cls(operator, account, system, stored.operator_jwt, stored.revocations)

    def save(self, path: Path) -> None:
        """Write the keys to `path` with mode 0600, whole or not at all; OSError as the file system says."""
        stored = _KeyFile(
            format=_FORMAT,
            operator_seed=self.operator._seed(),
            account_seed=self.account._seed(),
            system_seed=self.system._seed(),
            operator_jwt=self.operator_jwt,
            revocations=dict(self.revocations),
        )
        write_private(path, msgspec.json.encode(stored))

    def revoking(self, user_public_key: str, until_s: int | None = None) -> "PlaneKeys":
        """Return keys that void each JWT issued to that user up to `until_s` (wall; default now)."""
        until_s = int(time.time()) if until_s is None else until_s
        return replace(self, revocations={**self.revocations, user_public_key: until_s})

    def account_jwts(self) -> dict[str, str]:
        """Return the two account JWTs by public key, as the server's MEMORY resolver wants them."""
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), _UNLIMITED)
        storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), _UNLIMITED)
        jobs: dict[str, Any] = {
            "type": "account",
            "version": 2,
            "limits": {**limits, **storage, "wildcards": True},
        }
        if self.revocations:
            jobs["revocations"] = dict(self.revocations)
        system = {"type": "account", "version": 2, "limits": {**limits, "wildcards": True}}
        return {
            self.account.public: _sign(self.operator, self.account.public, "jobs", jobs, None),
            self.system.public: _sign(self.operator, self.system.public, "system", system, None),
        }


def worker_jwt(
    keys: PlaneKeys, user_public_key: str, *, ns: str, job: str, worker: str, expires_s: float
) -> str:
    """Return a JWT that allows a worker its job's orders, its own inbox and its own reports, and no more.

    `expires_s` counts from now. ValueError if `user_public_key` is not the public half of a user's NKey.
    """
    subscribes = [
        subjects.order_all(ns, job),
        subjects.order(ns, job, worker),
        subjects.inbox(user_public_key) + ".>",
    ]
    return _user(
        keys.account, user_public_key, worker, expires_s, subscribes, [subjects.report(ns, job, worker)]
    )


def check_worker(
    keys: PlaneKeys, jwt: str, signature: bytes, signed: bytes, *, ns: str, job: str, worker: str
) -> None:
    """Raise NotThisWorker unless `signature` over `signed` was made with the key that this JWT of ours was
    issued to, for that worker, and the JWT is still valid.
    """
    try:
        body, encoded_signature = jwt.rsplit(".", 1)
        _verify(keys.account.public, body.encode(), _unb64(encoded_signature))
        claims = json.loads(_unb64(body.split(".")[1]))
        public, issued_s, until_s = str(claims["sub"]), int(claims["iat"]), float(claims["exp"])
        publishes = claims["nats"].get("pub", {}).get("allow", [])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, InvalidSignature):
        raise NotThisWorker("the JWT is none of this control plane") from None
    if publishes != [subjects.report(ns, job, worker)]:
        raise NotThisWorker(f"the JWT is not that of {worker!r} in this job")
    if time.time() >= until_s or issued_s <= keys.revocations.get(public, -1):
        raise NotThisWorker("the JWT has run out, or was revoked")
    try:
        _verify(public, signed, signature)
    except (ValueError, InvalidSignature):
        raise NotThisWorker(f"the signature is not that of {worker!r}") from None


def _verify(public: str, data: bytes, signature: bytes) -> None:
    """ValueError if `public` is no NKey; InvalidSignature."""
    raw = base64.b32decode(public + "=" * (-len(public) % 8))
    Ed25519PublicKey.from_public_bytes(raw[1:-2]).verify(signature, data)  # between the kind and the checksum


def master_jwt(keys: PlaneKeys, user_public_key: str, *, name: str = "master", expires_s: float) -> str:
    """Return a JWT for everything in the account of the jobs, JetStream included."""
    return _user(keys.account, user_public_key, name, expires_s, [], [])


def system_jwt(keys: PlaneKeys, user_public_key: str, *, expires_s: float) -> str:
    """Return a JWT for the server's system account: who connects and disconnects, and why."""
    return _user(keys.system, user_public_key, "system", expires_s, [], [])


def expires_at_s(jwt: str) -> float | None:
    """Return the wall second at which a JWT expires, None if never. The signature is not checked."""
    try:
        claims = json.loads(_unb64(jwt.split(".")[1]))
        expiry = claims.get("exp")
        return None if expiry is None else float(expiry)
    except (IndexError, ValueError, AttributeError, TypeError):
        raise ValueError("cannot tell when a JWT expires: it is not a JWT") from None


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600 by an atomic rename: no reader ever sees a part of it or a wider mode."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # a leftover file of that name keeps its own mode
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def _user(
    account: NKey,
    public: str,
    name: str,
    expires_s: float,
    subscribes: Sequence[str],
    publishes: Sequence[str],
) -> str:
    subjects.inbox(public)  # raises for what is not a user's public key
    if not expires_s > 0:
        raise ValueError(
            f"cannot make a JWT that expires in {expires_s} s: want a positive number of seconds"
        )
    claims: dict[str, Any] = {"type": "user", "version": 2}
    claims |= dict.fromkeys(("subs", "data", "payload"), _UNLIMITED)
    if subscribes:
        claims["sub"] = {"allow": list(subscribes)}
    if publishes:
        claims["pub"] = {"allow": list(publishes)}
    # Rounded up: a JWT for a fraction of a second would have expired at once.
    return _sign(account, public, name, claims, -int(-(time.time() + expires_s) // 1))


def _sign(issuer: NKey, subject: str, name: str, nats: Mapping[str, Any], expires_at: int | None) -> str:
    claims = {"iat": int(time.time()), "iss": issuer.public, "name": name, "nats": nats, "sub": subject}
    if expires_at is not None:
        claims["exp"] = expires_at
    digest = hashlib.new("sha512_256", _compact(claims)).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    body = _b64(_compact(_HEADER)) + b"." + _b64(_compact(claims))
    return (body + b"." + _b64(issuer.sign(body))).decode()


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
