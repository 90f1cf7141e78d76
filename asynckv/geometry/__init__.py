"""Geometry: which bytes of which prefill rank belong into which bytes of which decode rank.

The two engines may have cut the model over different numbers of ranks, page it with different block sizes, and keep
heads before tokens or after; and decode may hold a part of the prompt already. One algorithm answers for every model.
There is no branch for a model family, and no size has to divide another. `docs/geometry.md` explains it with pictures.

**Its ideas.**

1. A rank *declares* what it holds. Each part of a layer says which range of the whole model's axis is here. A reader
   covers its own ranges by those of the remote ranks: an intersection, part by part, by name. Arrays that are cut by
   different axes, or each by itself, have to be declared as different parts: the x, B and C of a Mamba-2 convolution,
   or the q, k and v of a gated delta net.
2. Bytes move as NIXL's *descriptors*, ranges that are contiguous on both sides. The two layouts alone decide which ones
   a pair of blocks consists of, so that is worked out once per peer.
3. Blocks are paired by the *tokens* that they cover, never by their places in a list. That depends on the request
   alone.
4. So a plan is a product: pairs of blocks times rows of a table. It is expanded only when a transfer is posted.

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
`overlap` proves that no byte belongs to two things. For tiers (host memory and files) `packed` makes layouts, which are
like any other, and `kept` plans what is copied to them and loaded out of them.

**Words.** Our own side is *local*, the other *remote*; here the local rank is always the one that reads.

- *group*: layers that share block ids. *View*: where one layer's blocks lie in a memory. *Part*: one named array inside
  a block. *Held*: the range of the whole model's axis that a rank has of a part.
- *block*: what an engine allocates by id. *Kernel block*: what its memory is divided into; a block is `ratio` of them.
  *Page*: the bytes of a block, for groups that lie in the same memory. *Pool*: such groups; an id is one page in all.
- *place*: a position in a list of block ids. *Placeholder* (`NULL`): a place without a block.
- *share*: what is read of one part from one remote rank.
- *span*: a stretch of tokens inside one local and one remote kernel block; messages to people call it a *cut*.
- *descriptor*: a byte range that is contiguous on both sides, as NIXL moves it; messages to people call it a *piece*.
  *Row*: one descriptor of a table, the same for every pair of blocks but for the blocks' addresses.
- *range*: of bytes in one memory, or of entries of an axis; always `[lo, hi)`.
- *section*: of a plan, the pairs of blocks that share a table. *Read request*: what of a section one transfer takes.

**What it does not know**: messages, leases, peers that come and go, clocks, NIXL. It is pure, and imports nothing of
the package but `errors` and the checks of `arguments`. It trusts nobody: a layout or a list of blocks may come from a
stranger, so costs are bounded before they arise. It refuses what it cannot plan, with both numbers and a remedy, and at
the handshake if that can be seen there.
"""
