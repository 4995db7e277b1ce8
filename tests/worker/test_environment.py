"""The environment of a rank: our site folder first, no secret, and nothing else changed."""

from __future__ import annotations

import os

from aegis_elastic.worker.environment import (
    MARKER,
    SECRETS,
    SITE_DIR,
    as_given,
    prepare_env,
    set_for_ourselves,
)


def test_the_site_folder_comes_first_and_the_users_path_stays_behind_it() -> None:
    env = prepare_env({"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert env == {"PYTHONPATH": f"{SITE_DIR}:/a:/b", "HOME": "/h", MARKER: "set"}


def test_an_empty_or_missing_path_gets_no_empty_entry_because_that_means_the_current_folder() -> None:
    assert prepare_env({})["PYTHONPATH"] == SITE_DIR
    assert prepare_env({"PYTHONPATH": ""})["PYTHONPATH"] == SITE_DIR
    assert prepare_env({"PYTHONPATH": ":/a"})["PYTHONPATH"] == f"{SITE_DIR}::/a"


def test_preparing_twice_is_preparing_once() -> None:
    for env in ({}, {"PYTHONPATH": ""}, {"PYTHONPATH": "/a"}):
        assert prepare_env(prepare_env(env)) == prepare_env(env)


def test_secrets_are_removed_and_the_callers_mapping_is_left_alone() -> None:
    env = dict.fromkeys(SECRETS, "hush") | {"OTHER": "x"}
    before = dict(env)
    assert not set(SECRETS) & set(prepare_env(env))
    assert env == before


def test_the_site_folder_holds_nothing_else_that_could_be_imported() -> None:
    assert [name for name in os.listdir(SITE_DIR) if name != "__pycache__"] == ["sitecustomize.py"]


def test_what_we_set_for_ourselves_is_as_before_for_the_ranks() -> None:
    env = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    set_for_ourselves(env, TORCH_CPP_LOG_LEVEL="ERROR", GRPC_VERBOSITY="NONE")
    assert (env["TORCH_CPP_LOG_LEVEL"], env["GRPC_VERBOSITY"]) == ("INFO", "NONE")
    assert prepare_env(env).keys() - {"PYTHONPATH", MARKER} == {"TORCH_CPP_LOG_LEVEL"}
    assert as_given({**env, SECRETS[0]: "x"}) == {"TORCH_CPP_LOG_LEVEL": "INFO"}
