"""What other programs are shown of a job: metrics for Prometheus."""
