"""Geometry: which bytes of which prefill rank belong into which bytes of which decode rank.

The two engines may have cut the model over different numbers of ranks, page it with different block sizes, keep heads
before tokens or after, and decode may hold a part of the prompt already. One algorithm answers for every model; there
is no branch for a model family, and no size that has to divide another.

**Its ideas.**

1. A rank *declares* what it holds. Each part of a layer says which range of the whole model's axis is here. To read is
   to cover our ranges by those of the remote ranks: an intersection, part by part, by name. What is cut by different
   axes, or each by itself, has to be declared as different parts: the x, B and C of a Mamba-2 convolution, or the q, k
   and v of a gated delta net. `docs/geometry.md` shows why.
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
`overlap` proves that no byte belongs to two things. `packed` makes the layouts of memories in which blocks are only
kept, which are like any other, and `kept` plans what is copied to them and what is loaded out of them.

**Words.** What is ours is *local*, what is theirs *remote*; here the local rank is always the one that reads.

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

**What it refuses to know**: messages, leases, peers that come and go, clocks, NIXL. It is pure, and imports nothing of
the package but `errors` and the checks of `arguments`. It trusts nobody: a layout or a list of blocks may come from a
stranger, so costs are bounded before they arise. What it cannot plan it refuses with both numbers and a remedy, at the
handshake if it is seen there.
"""
