"""Where the parts of an experiment run: layouts, their choice by measurement, memory."""
