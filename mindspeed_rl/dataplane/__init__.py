"""The data plane between rollout, rewards and training: columns x consumers, with one client.

`data_strategy` picks the engine: `td`, our TransferDock actor, or `tq`, the published `transferqueue` package for many nodes.
"""

DATA_STRATEGIES = {
    "td": "mindspeed_rl.dataplane.client:TransferDockClient",
    "tq": "mindspeed_rl.dataplane.transfer_queue:TransferQueueClient",
}

ALIASES = {"transfer_dock": "td", "dock": "td", "transfer_queue": "tq", "queue": "tq"}
