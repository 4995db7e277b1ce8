"""The folders that a training's command line names, as people write them."""

from __future__ import annotations

import pytest

from aegis_elastic.core.checkpoints.arguments import (
    DEFAULT_FOLDERS,
    WatchedFolder,
    folders_to_watch,
    parse_watched_folder,
)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("pretrain_gpt.py --tensor-model-parallel-size 2 --save /ckpt/gpt --load /ckpt/old", "/ckpt/gpt"),
        ("run_clm.py --output_dir out/run --do_train", "/home/me/out/run"),
        ("run_clm.py --output-dir=out/run", "/home/me/out/run"),
        ("fit.py --trainer.default_root_dir runs", "/home/me/runs"),
        ("fit.py --default_root_dir runs/", "/home/me/runs"),
        ("train.py --checkpoint-dir /c --steps 3", "/c"),
        ("train.py --ckpt_dir /c", "/c"),
        ("hydra.py +exp_manager.exp_dir=/exp model=gpt", "/exp"),
        (
            "-m torchtitan.train --job.dump_folder ./outputs --checkpoint.folder ckpts",
            "/home/me/outputs/ckpts",
        ),
        ("-m torchtitan.train --job.dump_folder=./outputs", "/home/me/outputs/checkpoint"),
        ("train.py --save-dir '/with space'", "'/with"),
    ],
)
def test_the_folder_is_found(line: str, path: str) -> None:
    wanted = path if path.startswith("/") else f"/home/me/{path}"
    assert folders_to_watch(line.split(), "/home/me") == (WatchedFolder("auto", wanted),)


@pytest.mark.parametrize(
    "line",
    ["train.py", "train.py --save", "train.py --save --lr 1", "train.py --output_dir .", "t.py --save-dir /",
     "t.py --output_dir s3://bucket/run", "train.py --save ''", "t.py --output_dir ../me"],
)  # fmt: skip
def test_where_nothing_fit_is_named_the_usual_folders_are_looked_at(line: str) -> None:
    words = [word.strip("'") for word in line.split()]
    found = {place.path for place in folders_to_watch(words, "/home/me")}
    assert found <= {f"/home/me/{folder}" for folder in DEFAULT_FOLDERS}


def test_two_options_are_two_places_and_one_folder_is_one() -> None:
    line = "train.py --save /a --checkpoint-dir /b --output_dir /a/"
    assert [place.path for place in folders_to_watch(line.split(), "/home/me")] == ["/a", "/b"]


def test_a_place_can_be_named() -> None:
    assert parse_watched_folder("megatron:/ckpt", "/home/me") == WatchedFolder("megatron", "/ckpt")
    assert parse_watched_folder("auto:sub/folder", "/home/me") == WatchedFolder("auto", "/home/me/sub/folder")


@pytest.mark.parametrize(
    "text", ["", "megatron", "megatron:", "megatrn:/c", ":/c", "/c", "dcp:s3://bucket/x"]
)
def test_a_place_that_is_none_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(ValueError, match=r"KIND:PATH|names no folder"):
        parse_watched_folder(text, "/home/me")
