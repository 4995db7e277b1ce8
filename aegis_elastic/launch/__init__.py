"""What people start: `aegis-run`, `aegis-master` and `aegisctl`, from command line to exit code.

May import everything but `testing`; it prints, forks, starts processes and ends them. Nothing else imports
it. Start with `run.py` (the launcher's entry), then `launcher.py` (one launch from options to exit code).
"""
