"""The message bus: NATS names, credentials, the embedded server and a connection that outlives it."""
