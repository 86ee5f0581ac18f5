"""A run's page: metrics as charts, and its trace."""
