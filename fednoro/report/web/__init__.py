"""The shells of the pages of reports and audits: templates, styles, colours."""
