"""Geometry: which bytes of which prefill rank belong into which bytes of which decode rank (`docs/geometry.md`).

1. A rank *declares* what it holds: each part of a layer says which range of the whole model's axis is here. A reader
   covers its own ranges by those of the remote ranks. Arrays that are cut by different axes are different parts.
2. Bytes move as NIXL's *descriptors*, ranges that are contiguous on both sides. Which ones a pair of blocks consists of
   depends on the two layouts alone, and is worked out once per peer.
3. Blocks are paired by the *tokens* that they cover, never by their places in a list, once per request.
4. So a plan is a product: pairs of blocks times rows of a table. It is expanded only when a transfer is posted.

    our memory, declared          a remote rank's handshake
        | layout                      | check: decoded, bounded, nothing overlaps
        +------------- match ---------+        who is read for what; who must release whom
                         | shares
                       tables                  once per peer: the descriptors of every span of tokens
                         |
    our blocks, lent blocks                    blocks: ids checked, as arrays and as runs
        |  pairing                             once per request: blocks that hold the same tokens
        +------- plan                          pairs times tables, cut into read requests

For tiers (host memory and files) `packed` makes layouts, and `kept` plans copies. `docs/glossary.md` has the words.

Geometry is pure: it knows no messages, leases, clocks or NIXL, and imports only `errors` and `arguments`. A layout or a
list of blocks may come from a stranger, so costs are bounded before they arise.
"""
