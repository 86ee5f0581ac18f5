"""Generation servers: SGLang's HTTP API, what a server reports, and which server gets a request."""
