"""Recipes, comparisons of arms, tables, figures and the report."""
