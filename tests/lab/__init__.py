"""The laboratory: what finds out whether asynckv keeps its promises, and is installed nowhere.

- *Simulated services*, in virtual time: `simulate` is the command, `simulation` the library. `world` has processes,
  time, and what becomes of packets and transfers; `script` draws from a seed what goes wrong; `service` has engines,
  hostile allocators and checks; `oracles` say what must hold. `tier_*` are the same for offload. `doors` is where bugs
  are planted (`rigged`, `mutations`). `truth` and `leaks_truth` judge what `asynckv why` concludes, by heading.
- *Real processes*: `arena` has them; `chaos`, `pressure`, `attack` and `soak` hurt them, and `soak_offload` and
  `ucx_abort` have their own. `why_live` and `why_fresh` inject causes, and judge what `asynckv why` says of each.
  `alert_live` has engines behind a router (`stepper`), and measures how soon a fault is an alert.

Each command says what it does with `--help`: `python -m tests.lab.chaos --help`.
"""
