"""Raw data to Megatron indexed datasets; the same as `mindspeed-rl preprocess`."""

import sys

from mindspeed_rl.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
