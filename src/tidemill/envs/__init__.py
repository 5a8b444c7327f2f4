"""The family of environments: one contract (`tidemill.api.environment`), one file per
member. Importing a configuration imports no simulator."""
