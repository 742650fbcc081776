package bootstrap

import "golang.org/x/sys/windows"

// localErrnos are the errors of a process without descriptors, ports or buffers.
var localErrnos = []error{windows.WSAEMFILE, windows.WSAEADDRNOTAVAIL, windows.WSAENOBUFS, windows.ERROR_TOO_MANY_OPEN_FILES}
