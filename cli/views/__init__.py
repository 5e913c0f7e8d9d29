"""Views: state and results as text, tables and HTML. They read nothing and decide nothing."""
