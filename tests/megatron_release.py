"""What the installed release of Megatron has, for tests of several releases."""

from __future__ import annotations

import importlib.metadata

RELEASE = importlib.metadata.version("megatron-core")
#: without TransformerEngine, all experts of a rank in one product
GROUPED_EXPERTS = RELEASE.startswith("0.16.")
#: the state that all ranks have is a file `common.pt`; later it is an object among the others
COMMON_FILE = int(RELEASE.split(".")[1]) < 19
#: without TransformerEngine, latent attention whose queries have no rank
PLAIN_LATENT_QUERIES = COMMON_FILE
