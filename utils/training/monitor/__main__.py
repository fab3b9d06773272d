"""Streamlit's command line, with all that the page needs loaded before: the first visitor would wait for it."""

from streamlit.web.cli import main

import utils.training.monitor.app  # noqa: F401

main(prog_name="streamlit")
