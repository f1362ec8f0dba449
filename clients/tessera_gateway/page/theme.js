// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's goes.
const theme = localStorage.getItem("tessera.theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
