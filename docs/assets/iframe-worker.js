// Browsers start no worker in a page that was opened from a folder: the search then runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.addEventListener("DOMContentLoaded", () => this.start(frame, url))
      if (document.body) this.start(frame, url)
    }
    start(frame, url) {
      if (this.frame) return
      document.body.appendChild(frame)
      this.frame = frame
      frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = () => { this.ready = true; this.waiting.splice(0).forEach(data => this.postMessage(data)) }
      frame.contentDocument.body.appendChild(script)
    }
    postMessage(data) {
      if (!this.ready) return this.waiting.push(data)
      const { MessageEvent } = this.frame.contentWindow
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
