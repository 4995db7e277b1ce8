"""What people start: `aegis-run` (the launcher), `aegisctl`, and where both find a job's files."""
