"""The laboratory: what finds out whether asynckv keeps its promises, and is installed nowhere.

- *Simulated services*, in virtual time: `simulate` is the command, `simulation` the library. `world` has processes,
  time, and what becomes of packets and transfers; `script` draws from a seed what goes wrong; `service` has engines,
  hostile allocators and checks; `oracles` say what must hold. `tier_*` are the same for offload. `doors` is where bugs
  are planted. `truth` and `leaks_truth` judge what `asynckv why` concludes.
- *Real processes*: `arena` has them; `chaos`, `pressure`, `attack`, `soak`, `soak_offload` and `ucx_abort` hurt them.
  `why_live` injects causes, and judges what `asynckv why` says of each.

Each command says what it does with `--help`: `python -m tests.lab.chaos --help`.
"""
