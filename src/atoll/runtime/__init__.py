"""The real world: sockets, clocks, disks and processes. Carries out effects, decides nothing."""
