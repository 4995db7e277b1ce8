"""Every decision, pure: no clock, socket, file, process or torch. Standard library and msgspec only."""
