"""What stands before the calls of a server: API keys, bodies that are read only as far as they may go, and signed addresses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from mindspeed_rl.files import read_regular, write_file
from mindspeed_rl.service.replies import RefusedError

#: types of ASGI
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

#: bytes of all bodies that are being read at the same time, and of one tenant's bodies
_MAX_BYTES_AT_ONCE, _MAX_BYTES_OF_TENANT = 1 << 30, 1 << 28
#: longest wait for the next part of a body, and longest time for which the rest of a body that is too long is read
_MAX_SILENCE_S, _DROP_S = 60.0, 10.0
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: the SDK takes no other keys
_KEY = re.compile(r"tml-[!-~]{8,500}")
_MAX_KEYS_BYTES = 1 << 20
#: seconds for which a token of a key, and the address of a file, can be used
_TOKEN_S, ADDRESS_S = 3600, 3600
#: Host headers of this machine, with any port
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?", re.IGNORECASE | re.ASCII)


#: headers on which it depends who asks for what
_ONCE = (b"x-api-key", b"host", b"content-type", b"content-encoding", b"content-length")


def read_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request.

    Raises:
        RefusedError: one that decides is there twice, of which a proxy may read the first and this server the last.
    """
    names = [name for name, _ in scope["headers"]]
    if twice := [name.decode("latin-1") for name in _ONCE if names.count(name) > 1]:
        raise RefusedError(400, f"the header {twice[0]} is given twice")
    return dict(scope["headers"])


def read_keys(path: Path) -> dict[str, str]:
    """Return owners by API key, from a file with a key and its owner in each line; # begins a comment.

    Raises:
        ValueError: a line is wrong, or everybody on this machine can read the file; the text has no key.
    """
    try:
        lines = read_regular(path, _MAX_KEYS_BYTES).decode("utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve_config.api_keys_file {path} cannot be read: {error}") from None
    if mode & stat.S_IROTH:
        raise ValueError(f"serve_config.api_keys_file {path} can be read by everybody on this machine: chmod 600 {path}")
    owners: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"serve_config.api_keys_file {path}, line {number}"
        if len(words) != 2:
            raise ValueError(f"{where} has {len(words)} words; expected an API key and its owner")
        key, owner = words
        if not _KEY.fullmatch(key):
            raise ValueError(f"{where}: an API key begins with 'tml-' and has 8 to 500 printable characters after it")
        if not _OWNER.fullmatch(owner):
            raise ValueError(f"{where}: the owner {owner!r} is no name of 1 to 64 letters, digits, '.', '_' and '-'")
        if key in owners:
            raise ValueError(f"{where}: this key stands twice in the file")
        owners[key] = owner
    if not owners:
        raise ValueError(f"serve_config.api_keys_file {path} has no key")
    return owners


class Keys:
    """API keys, tokens that stand for one for some time, and addresses of files.

    Args:
        owners: owner of each key; None takes any key, and each is a tenant of its own.
        secret: signs tokens and addresses.
        only_local: only requests to a name of this machine are taken, so that no web page gets here through a name of its own.
    """

    def __init__(self, owners: Mapping[str, str] | None, secret: bytes, *, only_local: bool) -> None:
        self._secret, self._only_local, self._takes_any = secret, only_local, owners is None
        # compared by digest: the time of a look-up then says nothing about a key
        self._owners = {self._hash(key): owner for key, owner in (owners or {}).items()}

    def _hash(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise RefusedError for a request to another name than this machine's."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._only_local and not _OWN_HOST.fullmatch(host):
            raise RefusedError(403, f"this server is reached as 127.0.0.1 or localhost, not as {host[:200]!r}")

    def find_tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the tenant of a request.

        Raises:
            RefusedError: it has no key, or one that is not known.
        """
        key = headers.get(b"x-api-key", b"").decode("latin-1")
        if not key:
            raise RefusedError(401, "this server asks for an API key: header X-API-Key")
        if key.startswith("eyJ"):
            return self._read_token(key)
        owner = self._owners.get(self._hash(key))
        if owner is None and self._takes_any and _KEY.fullmatch(key):
            owner = f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        if owner is None:
            raise RefusedError(401, "this API key is not known here; keys begin with 'tml-'")
        return owner

    def make_token(self, tenant: str) -> str:
        """Return a token (JWT) that stands for a tenant's key for an hour."""
        claims = {"iss": "mindspeed-rl", "sub": tenant, "exp": int(time.time()) + _TOKEN_S}
        head = _encode({"alg": "HS256", "typ": "JWT"})
        text = f"{head}.{_encode(claims)}"
        return f"{text}.{self._sign('token', text)}"

    def _read_token(self, token: str) -> str:
        text, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("token", text).encode()):
            raise RefusedError(401, "this token was not made here")
        claims = json.loads(_decode(text.rpartition(".")[2]))
        if claims["exp"] <= time.time():
            raise RefusedError(401, "this token has expired; auth/token makes another one")
        if not self._takes_any and claims["sub"] not in self._owners.values():
            raise RefusedError(401, "the key of this token is no longer known here")
        return claims["sub"]

    def make_address(self, folder: str, name: str) -> str:
        """Return the end of an address, without a key, of a file of a checkpoint."""
        text = _encode({"folder": folder, "name": name, "exp": int(time.time()) + ADDRESS_S})
        return f"{text}.{self._sign('file', text)}"

    def read_address(self, text: str) -> tuple[str, str]:
        """Return the folder and the name of an address.

        Raises:
            RefusedError: it was not made here, or has expired.
        """
        value, _, signature = text.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("file", value).encode()):
            raise RefusedError(404, "there is no such file")
        claims = json.loads(_decode(value))
        if claims["exp"] <= time.time():
            raise RefusedError(410, "this address has expired; ask for another one")
        return claims["folder"], claims["name"]

    def _sign(self, purpose: str, text: str) -> str:
        digest = hmac.digest(self._secret, f"{purpose} {text}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _encode(value: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def read_secret(path: Path) -> bytes:
    """Return the secret of a server's folder, which is made at its first start."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.close(descriptor)
        write_file(path, secrets.token_hex(32))
    secret = read_regular(path, 4096)
    if len(secret) < 32:
        raise ValueError(f"{path} has {len(secret)} bytes and is no secret; remove it, and a new one is made")
    return secret


class BodyReader:
    """Reads bodies: never more of one than it may have, and of all together no more than the memory is for."""

    def __init__(self) -> None:
        self._reading: defaultdict[str, int] = defaultdict(int)

    async def read(self, tenant: str, headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
        """Return a body of a tenant.

        The rest of one that is too long is read and dropped for some time: a client that is still sending reads no reply.

        Raises:
            RefusedError: it is too long, does not arrive, or there is no memory for it at the moment.
        """
        length = headers.get(b"content-length", b"0" if b"transfer-encoding" not in headers else b"")
        if not length.isdigit():
            raise RefusedError(411, "a body needs its length: header Content-Length")
        size = int(length[:20])
        if size > max_bytes:
            await _drop(receive)
            raise RefusedError(413, f"a body of this call has at most {max_bytes} bytes, and this one has {size}")
        is_full = size + sum(self._reading.values()) > _MAX_BYTES_AT_ONCE
        if is_full or size + self._reading[tenant] > _MAX_BYTES_OF_TENANT:
            await _drop(receive)
            raise RefusedError(503, "too many bodies are being read at the moment; send it again")
        self._reading[tenant] += size
        try:
            return await self._read(receive, size)
        finally:
            self._reading[tenant] -= size

    async def _read(self, receive: Receive, size: int) -> bytes:
        chunks, read, has_more = [], 0, True
        while has_more:
            try:
                event = await asyncio.wait_for(receive(), _MAX_SILENCE_S)
            except asyncio.TimeoutError:
                raise RefusedError(408, f"nothing of the body arrived for {_MAX_SILENCE_S:.0f} s") from None
            if event["type"] == "http.disconnect":
                raise RefusedError(400, "the connection ended before the body did")
            chunks.append(event.get("body", b""))
            read += len(chunks[-1])
            has_more = event.get("more_body", False)
            if read > size:
                raise RefusedError(400, f"the body is longer than its Content-Length of {size} bytes")
        return b"".join(chunks)


async def _drop(receive: Receive) -> None:
    stop_s, has_more = time.monotonic() + _DROP_S, True
    while has_more and time.monotonic() < stop_s:
        try:
            event = await asyncio.wait_for(receive(), _DROP_S)
        except asyncio.TimeoutError:
            return
        has_more = event["type"] != "http.disconnect" and event.get("more_body", False)


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the content of a body that may be compressed, at most `max_bytes`.

    Raises:
        RefusedError: it is too long, or not compressed as its header says.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RefusedError(400, f"Content-Encoding {encoding[:100]!r} is not read here; zstd is")
    try:
        with pyarrow.CompressedInputStream(io.BytesIO(body), "zstd") as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise RefusedError(400, f"the body is no zstd: {error}") from None
    if len(content) > max_bytes:
        raise RefusedError(413, f"a body of this call has at most {max_bytes} bytes when it is decompressed")
    return content
