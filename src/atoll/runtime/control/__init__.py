"""Control of a running peer by its operator: the local socket and its commands."""
