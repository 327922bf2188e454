"""`mindspeed-rl serve`: its run file, and what is refused before a model is loaded."""

import socket

import pytest

from mindspeed_rl.cli.main import main


def test_explain_shows_what_a_server_offers_and_no_loop(capsys):
    assert main(["explain", "--config-name", "serve_tiny_cpu", "serve_config.port=8123", "serve_config.num_models=3"]) == 0
    shown = capsys.readouterr().out
    assert "serve_tiny_cpu: server" in shown and shown.rstrip().endswith("valid")
    assert "http://127.0.0.1:8123" in shown and "3 at the same time, adapters of rank 1 to 32" in shown
    assert "Objective" not in shown and "train_iters" not in shown and "Still needed" not in shown


def test_explain_shows_a_server_of_full_weights(capsys):
    words = ["actor_config.lora_target_modules=null", "generate_config.lora_push=merged", "serve_config.num_models=1"]
    assert main(["explain", "--config-name", "serve_tiny_cpu", *words]) == 0
    assert "one, with full weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["serve", "--config-name", "grpo_tiny_cpu"], "has no group serve_config"),
        (["train", "--config-name", "serve_tiny_cpu"], "mindspeed-rl serve starts it"),
        (["serve", "--config-name", "serve_tiny_cpu", "serve_config.api_keys_file=/nowhere"], "/nowhere cannot be read"),
        (["serve", "--config-name", "serve_tiny_cpu", "serve_config.port=-1"], "port"),
        (["serve", "--config-name", "serve_tiny_cpu", "actor_config.lora_target_modules=null"], "trains full weights"),
        (["serve", "--config-name", "serve_tiny_cpu", "serve_config.host=0.0.0.0"], "api_keys_file"),
    ],
)
def test_a_wrong_run_file_is_refused_before_the_model_is_loaded(words, text, capsys):
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_a_port_that_is_in_use_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--config-name", "serve_tiny_cpu", f"serve_config.port={port}"]) == 2
    assert f"serve_config.port {port}" in capsys.readouterr().err
