"""Remote environments: a small HTTP protocol (docs/rest.md), its client in two forms, a
reference server with fault injection, and a doctor; and OpenEnv's servers."""
