"""`mindspeed-rl download`: fetch a model or a data set of a hub into its cache, for a machine without network."""

from __future__ import annotations

from mindspeed_rl.cli.options import Parser, print_status
from mindspeed_rl.hub import Kind, fetch, parse_hub_name


def main(argv: list[str]) -> int:
    """Fetch what is named and print its folder; return 0, or 2 where that is not possible."""
    parser = Parser(prog="mindspeed-rl download", description="Fetch a model or a data set into the cache of its hub.")
    parser.add_argument("name", help="owner/name (Hugging Face) or ms://owner/name (ModelScope), with @revision if needed")
    parser.add_argument("--dataset", action="store_true", help="a data set; all its files are fetched")
    parser.add_argument(
        "--without-weights", action="store_true", help="config.json and tokenizer of a model: enough for new, explain and plan"
    )
    try:
        arguments = parser.parse_args(argv)
        name = parse_hub_name(arguments.name)
        if name is None:
            raise ValueError(f"'{arguments.name}' is not a name on a hub (owner/name, ms://owner/name), or names a folder here")
        if arguments.dataset and arguments.without_weights:
            raise ValueError("--without-weights is for models; a data set has none")
        kind: Kind = "dataset" if arguments.dataset else "tokenizer" if arguments.without_weights else "model"
        print_status(f"fetching {name} from {name.endpoint} ...")
        print(fetch(name, "download", kind), flush=True)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_status("interrupted; the same command goes on from here")
        return 130
    return 0
