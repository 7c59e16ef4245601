// Markup in which nothing can act, by a list of what asciinema's player builds its surface of: whatever else there is in HTML, it is not this.

const NAMES = "button|canvas|defs|div|g|kbd|li|mask|p|path|polygon|polyline|pre|rect|span|svg|ul";
const ATTRIBUTES =
  "aria-(?:hidden|label|live)|class|d|fill(?:-rule)?|height|id|mask|points|preserveAspectRatio|stroke(?:-[a-z]+)?|tabindex|type|version|viewBox|width|xmlns";
// A value names nothing that would be fetched but a part of the same page.
const VALUE = '"(?:[^"<>&()]*|url\\(#[a-z-]+\\))"';
const TAG = `<(?:/(?:${NAMES})|(?:${NAMES})(?: (?:${ATTRIBUTES})=${VALUE})*/?)>`;
const ONLY = new RegExp(`^(?:[^<]|${TAG})*$`);

/**
 * Whether all of it only shows.
 * @param {string} markup
 */
export const onlyShows = (markup) => ONLY.test(markup);
