"""Forecasts of the request rate: Holt-Winters, a Kalman filter, or the last value."""
