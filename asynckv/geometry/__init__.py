"""Geometry: which bytes of which prefill rank belong into which bytes of which decode rank.

The two engines may have cut the model over different numbers of ranks, page it with different block sizes, keep heads
before tokens or after, and decode may hold a part of the prompt already. One algorithm answers for every model; there
is no branch for a model family, and no size that has to divide another.

**Its ideas.**

1. A rank *declares* what it holds. Each part of a layer says which range of the whole model's axis is here. To read is
   to cover our ranges by those of the remote ranks: an intersection, part by part, by name.
2. Bytes move as NIXL's *descriptors*, ranges that are contiguous on both sides. Which ones a pair of blocks consists of
   depends on the two layouts alone, and is worked out once per peer.
3. Blocks meet by the *tokens* that they cover, never by their places in a list. That depends on the request alone.
4. So a plan is a product, pairs of blocks times rows of a table, and stays one until a transfer is posted.

**Data from entry to exit**, with the module that each step is in:

    our memory, declared          a remote rank's handshake
        | layout                      | check: decoded, bounded, nothing overlaps
        +------------- match ---------+        who is read for what; who must release whom
                         | shares
                       tables                  once per peer: the descriptors of every span of tokens
                         |
    our blocks, lent blocks                    blocks: ids checked, as arrays and as runs
        |  pairing                             once per request: blocks that hold the same tokens
        +------- plan                          pairs times tables, cut into read requests

Beneath these, `bounds` has the numbers that nothing may exceed, `strides` folds one array into contiguous ranges, and
`overlap` proves that no byte belongs to two things.

**What it refuses to know**: messages, leases, peers that come and go, clocks, NIXL. It is pure, and imports nothing of
the rooms around it. It trusts nobody: a layout or a list of blocks may come from a stranger, so costs are bounded
before they arise. What it cannot plan it refuses with both numbers and a remedy, at the handshake if it is seen there.
"""
