"""Prints the product of features: python tests/product_matrix.py

Each pair of the ingredients of `tests/dist/product_runs.py` is allowed by the rules of the package, and has then the last day
on which a run with both has equalled its reference (`tests/dist/product_compared.json`), or is refused, with the rule.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Print the matrix."""
    here = Path(__file__).parent
    sys.path[:0] = [str(here / "dist"), str(here), str(here.parent)]
    from product_runs import print_matrix

    with tempfile.TemporaryDirectory(prefix="product-") as root:
        print_matrix(Path(root))


if __name__ == "__main__":
    main()
