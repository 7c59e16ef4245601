// Runs before the libraries of a page. They make <style> elements and write style attributes; the page's policy refuses both where they come
// from markup. A <style> element that a script makes gets the nonce of this response, and a style attribute is set through the CSSOM, which the
// policy does not concern. Markup has neither way.
(() => {
  const { content: nonce } = document.querySelector('meta[property="csp-nonce"]');
  const { createElement } = Document.prototype;
  Document.prototype.createElement = function (...wanted) {
    const made = createElement.apply(this, wanted);
    if (made instanceof HTMLStyleElement) made.nonce = nonce;
    return made;
  };
  const { setAttribute } = Element.prototype;
  Element.prototype.setAttribute = function (name, value) {
    if (String(name).toLowerCase() === "style" && this.style !== undefined) this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
})();
