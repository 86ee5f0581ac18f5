"""All servers together: requests, weight pushes, recovery, offloading."""
