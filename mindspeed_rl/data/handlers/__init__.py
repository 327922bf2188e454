"""One handler a data layout; `mindspeed_rl.data.HANDLERS` maps names to them."""
