"""What can go wrong for the people at the command line, each with the exit code that says so."""

from __future__ import annotations


class LaunchError(Exception):
    """Base: the message is meant for a person, `exit_code` for their script."""

    exit_code = 1


class UsageError(LaunchError):
    """The user's fault: a flag, value or file that can't be used. Found before anything is started."""

    exit_code = 2


class NoSuchJob(LaunchError):
    """No job here fits the name, or none (or more than one) is live where no name was given."""

    exit_code = 3


class AdminUnreachable(LaunchError):
    """The machine's fault: a job's master doesn't answer. The training may be fine all the same."""


class AdminRefused(LaunchError):
    """The master has refused the call."""


class BadRecord(LaunchError):
    """A file of a job's run directory is there but can't be read as what it should be."""
