"""Templates of the files that `mindspeed-rl new` writes; `string.Template` fills in what begins with "$"."""
