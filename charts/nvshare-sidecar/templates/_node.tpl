{{/*
For pods on nodes whose coordinator runs with advertise.mode: external, without the plugin's mounts:
"nvshare.node.env" (as "nvshare.sidecar.env"), "nvshare.node.volumeMounts" and "nvshare.node.volumes".
They mount directories of the host, which Pod Security allows in privileged namespaces only.
*/}}

{{- define "nvshare.node.env" -}}
{{- $settings := include "nvshare.sidecar.settings" .root | fromYaml -}}
- name: LD_PRELOAD
  value: /opt/nvshare/current/$LIB/libnvshare_hook.so
- name: NVSHARE_SOCKET
  value: /run/nvshare/hooks.sock
- name: NVSHARE_MEMORY
  value: {{ $settings.memoryMode }}
- name: NVSHARE_NAME
  value: {{ .name | quote }}
{{- if hasKey . "priority" }}
- name: NVSHARE_PRIORITY
  value: {{ int .priority | quote }}
{{- end }}
{{- with .memoryLimit }}
- name: NVSHARE_MEMORY_LIMIT
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "nvshare.node.volumeMounts" -}}
- name: nvshare-library
  mountPath: /opt/nvshare
  readOnly: true
- name: nvshare-run
  mountPath: /run/nvshare
  readOnly: true
{{- end }}

{{- define "nvshare.node.volumes" -}}
{{- $settings := include "nvshare.sidecar.settings" . | fromYaml }}
- name: nvshare-library
  hostPath:
    path: {{ $settings.hostPaths.libraryDirectory }}/lib
    type: Directory
- name: nvshare-run
  hostPath:
    path: {{ $settings.hostPaths.socketDirectory }}
    type: Directory
{{- end }}
