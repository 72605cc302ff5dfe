{{/*
A coordinator inside a pod, for containers that share one GPU.  Use all four in a pod's specification:

    initContainers:
      {{- include "nvshare.sidecar" . | nindent 6 }}
    containers:
      - name: worker
        env:
          {{- include "nvshare.sidecar.env" (dict "root" . "name" "worker" "priority" 10 "memoryLimit" "8GiB") | nindent 10 }}
        volumeMounts:
          {{- include "nvshare.sidecar.volumeMounts" . | nindent 10 }}
    volumes:
      {{- include "nvshare.sidecar.volumes" . | nindent 6 }}

They read `.Values.nvshare`, over the defaults of this chart.  Nothing here needs a permission in the cluster, a path of the
host, or root.
*/}}

{{- define "nvshare.sidecar.settings" -}}
{{- $given := default dict .Values.nvshare }}
{{- $defaults := omit (default dict (index .Values "nvshare-sidecar")) "global" }}
{{- if not $defaults }}
{{- fail "nvshare-sidecar: name this library in dependencies, without an alias" }}
{{- end }}
{{- $known := keys $defaults }}
{{- range $key, $value := $given }}
{{- if not (has $key $known) }}
{{- fail (printf "nvshare.%s: there is no such value; there are %s" $key (join ", " (sortAlpha $known))) }}
{{- end }}
{{- end }}
{{- $settings := mergeOverwrite (deepCopy $defaults) (deepCopy $given) }}
{{- if not (has $settings.memoryMode (list "auto" "swap" "managed" "device")) }}
{{- fail (printf "nvshare.memoryMode: %v: is none of auto, swap, managed, device" $settings.memoryMode) }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- define "nvshare.sidecar.image" -}}
{{- $image := .image }}
{{- $name := $image.repository }}
{{- if $image.registry }}{{ $name = printf "%s/%s" ($image.registry | trimSuffix "/") $name }}{{ end }}
{{- $name = printf "%s:%s" $name (default "0.2.0" $image.tag) }}
{{- if $image.digest }}{{ $name = printf "%s@%s" $name $image.digest }}{{ end }}
{{- $name }}
{{- end }}

{{- define "nvshare.sidecar.security" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "nvshare.sidecar" -}}
{{- $settings := include "nvshare.sidecar.settings" . | fromYaml }}
- name: nvshare-library
  image: {{ include "nvshare.sidecar.image" $settings }}
  imagePullPolicy: {{ $settings.image.pullPolicy }}
  command: [nvshare-install-library]
  args:
    - --to=/nvshare/library/lib
  securityContext:
    {{- include "nvshare.sidecar.security" . | nindent 4 }}
  volumeMounts:
    # The volume is root's; the directory in it belongs to the coordinator's user.
    - name: nvshare-library
      mountPath: /nvshare/library
- name: nvshare
  # A native sidecar: it starts before the other containers and stops after them.
  restartPolicy: Always
  image: {{ include "nvshare.sidecar.image" $settings }}
  imagePullPolicy: {{ $settings.image.pullPolicy }}
  command: [nvshare-coordinator]
  args:
    - --runtime-dir=/run/nvshare
  env:
    - name: NVSHARE_RUNTIME_DIR
      value: /run/nvshare
    {{- /* The pod's author sets each container's priority, whatever its user. */}}
    {{- range $key, $value := merge (deepCopy $settings.settings) (dict "max_priority" 1000) }}
    - name: {{ printf "NVSHARE_%s" (upper $key) }}
      value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ int64 $value | quote }}{{ end }}
    {{- end }}
    {{- include "nvshare.sidecar.gpuEnv" (dict "settings" $settings "capabilities" "utility") | nindent 4 }}
  startupProbe:
    exec:
      command: [nvshare-ctl, status]
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 60
  resources:
    {{- include "nvshare.sidecar.resources" (dict "settings" $settings "resources" $settings.resources) | nindent 4 }}
  securityContext:
    {{- include "nvshare.sidecar.security" . | nindent 4 }}
  volumeMounts:
    # The mount is the directory's parent, so that the coordinator creates the directory as its own user.
    - name: nvshare-run
      mountPath: /run
    - name: nvshare-tmp
      mountPath: /tmp
{{- end }}

{{/* Only without a claim: CDI provides a claim's device without variables. */}}
{{- define "nvshare.sidecar.gpuEnv" -}}
{{- if not .settings.gpu.claim -}}
- name: NVIDIA_VISIBLE_DEVICES
  value: {{ .settings.gpu.visibleDevices | quote }}
- name: NVIDIA_DRIVER_CAPABILITIES
  value: {{ .capabilities | quote }}
{{- end }}
{{- end }}

{{/* Resources of a container that uses the GPU: (dict "settings" the library's settings, "resources" requests and limits). */}}
{{- define "nvshare.sidecar.resources" -}}
{{- $resources := deepCopy (default dict .resources) }}
{{- if .settings.gpu.claim }}
{{- $_ := set $resources "claims" (list (dict "name" .settings.gpu.claim)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* The same for a container of the pod: (dict "root" $ "resources" ...). */}}
{{- define "nvshare.sidecar.containerResources" -}}
{{- $settings := include "nvshare.sidecar.settings" .root | fromYaml }}
{{- include "nvshare.sidecar.resources" (dict "settings" $settings "resources" .resources) }}
{{- end }}

{{/* (dict "root" $ "name" how it is shown, "priority" optional, "memoryLimit" optional) */}}
{{- define "nvshare.sidecar.env" -}}
{{- $settings := include "nvshare.sidecar.settings" .root | fromYaml -}}
# Only glibc's loader expands $LIB: a musl image finds no file and runs the program without the hook.
- name: LD_PRELOAD
  value: /nvshare/library/lib/current/$LIB/libnvshare_hook.so
- name: NVSHARE_SOCKET
  value: /nvshare/run/nvshare/hooks.sock
- name: NVSHARE_COORDINATOR_USER
  value: "65532"
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
{{- with include "nvshare.sidecar.gpuEnv" (dict "settings" $settings "capabilities" "compute,utility") }}
{{ . }}
{{- end }}
{{- end }}

{{- define "nvshare.sidecar.volumeMounts" -}}
- name: nvshare-library
  mountPath: /nvshare/library
  readOnly: true
- name: nvshare-run
  mountPath: /nvshare/run
  readOnly: true
{{- end }}

{{- define "nvshare.sidecar.volumes" -}}
- name: nvshare-library
  emptyDir:
    sizeLimit: 64Mi
- name: nvshare-run
  emptyDir:
    sizeLimit: 64Mi
- name: nvshare-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- end }}
