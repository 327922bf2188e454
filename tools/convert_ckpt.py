"""Convert checkpoints between HF and Megatron; see docs/checkpoint_conversion.md."""

import sys

from mindspeed_rl.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
