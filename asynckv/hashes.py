"""One chain of hashes per prompt, by which two engines compare the inputs of their KV.

Each hash covers `hash_tokens` tokens, all tokens before them, and everything else that the KV depends on up to there.
The last one covers the remaining tokens. The chain is the same in every process and on every machine.

A client that finds a second prompt with the hash of a first one gets wrong KV into a prefix cache, so a hash has 192
bits of SHA-256, and the next one continues from all 256.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence

from asynckv.arguments import integer
from asynckv.errors import LocalProtocolError
from asynckv.geometry.bounds import MAX_TOKENS

BYTES = 24  # bytes of each returned digest, which are 32 characters


def token_hashes(tokens: Sequence[int], hash_tokens: int, *, also: Iterable[tuple[int, str | bytes]] = ()) -> list[str]:
    """Make a prompt's chain, for `make_params(hashes=)` on one side and `pull(hashes=)` on the other.

    Both sides hash the lent tokens: the decode side hashes its own first `params["num_tokens"]` tokens, with
    `params["hash_tokens"]`.

    Args:
        tokens: Token ids.
        hash_tokens: Tokens per hash. The last hash covers the remaining tokens.
        also: Other inputs of the KV, as `(token, text)` with the first token that depends on it: the name of an adapter
            or a tenant's salt from token 0 on, the digest of an image from its first token on. The order counts.

    Raises:
        LocalProtocolError: A token is no integer, or `hash_tokens` is out of range.
    """
    every = integer("hash_tokens", hash_tokens, 1, MAX_TOKENS)
    depends: dict[int, bytes] = {}
    try:
        ids = array("q", tokens)
        for at, text in also:
            said = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            more = at.to_bytes(8, "little") + len(said).to_bytes(8, "little") + said
            if at < len(ids):  # later tokens may belong to another prompt
                depends[at // every] = depends.get(at // every, b"") + more
    except (TypeError, ValueError, OverflowError, AttributeError) as exc:
        raise LocalProtocolError(
            f"tokens are integers of 64 bits, and also has pairs of a token and a text: {exc}"
        ) from exc
    if sys.byteorder == "big":
        ids.byteswap()
    data, found, digest = memoryview(ids).cast("B"), [], b""
    for chunk, begin in enumerate(range(0, len(ids), every)):
        taken = data[8 * begin : 8 * (begin + every)]
        chain = hashlib.sha256(digest + len(taken).to_bytes(8, "little"))
        chain.update(taken)
        chain.update(depends.get(chunk, b""))
        digest = chain.digest()
        found.append(b64encode(digest[:BYTES]).decode())
    return found
