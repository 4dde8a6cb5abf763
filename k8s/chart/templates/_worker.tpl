{{/* A Deployment of workers: dict root, role (prefill or decode), pool (its name), spec (of values), worker (image). */}}
{{- define "pdmesh.worker" -}}
{{- $root := .root -}}
{{- $name := include "pdmesh.name" $root -}}
{{- $app := dict "root" $root "app" .role "component" "worker" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}-{{ .role }}{{ if ne .pool "blue" }}-{{ .pool }}{{ end }}
  labels:
    {{- include "pdmesh.labels" $app | nindent 4 }}
  annotations:
    {{- include "pdmesh.skips" . | nindent 4 }}
spec:
  # No replicas where something scales it: a number would return with each change, as if a person had set it.
  {{- if or (ne .pool "blue") (not $root.Values.autoscaler.enabled) (eq $root.Values.autoscaler.scaling "watch") }}
  replicas: {{ .spec.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "pdmesh.selector" $app | nindent 6 }}
      pdmesh-pool: {{ .pool }}
  # A new pod serves before an old one ends.
  strategy:
    rollingUpdate:
      maxUnavailable: 0
      maxSurge: 1
  # After this time every router has discovered a ready pod.
  minReadySeconds: 5
  progressDeadlineSeconds: {{ max 1200 (div (mul 3 .spec.startupS) 2) }}
  template:
    metadata:
      labels:
        {{- include "pdmesh.labels" $app | nindent 8 }}
        pdmesh-pool: {{ .pool }}
      {{- with .spec.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      # SIGTERM drains: the worker leaves the registry at once, finishes or migrates its requests (--drain-grace-s) and waits for
      # its pushes. No preStop: workers are not discovered by endpoints, which would have to settle first.
      {{- include "pdmesh.pod" (dict "root" $root "account" "worker" "priority" .role "grace" (add .spec.drainGraceS 30) "policy" true) | nindent 6 }}
      {{- include "pdmesh.spread" (dict "root" $root "app" .role) | nindent 6 }}
      {{- with .spec.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .spec.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .spec.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $folder := printf "/models/%s" $root.Values.model.name }}
      {{- include "pdmesh.modelContainer" (dict "root" $root "command" (list "cp" "-r" "/model/." $folder)) | nindent 6 }}
      containers:
        - name: {{ .role }}
          image: {{ include "pdmesh.image" (dict "root" $root "image" .worker) }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          command: ["python", "-m", "{{ .role }}_service"]
          # Settings are variables, so that values name one. Transports: shm and cuda_ipc need a shared network namespace, which two
          # pods do not have.
          args:
            - --host=0.0.0.0
            - --port=50051
            - --metrics-port=9464
            - --transfer-port=50052
            - --transports=tcp,grpc
            - --drain-grace-s={{ .spec.drainGraceS }}
          env:
            {{- $own := dict "PDMESH_MODEL" $folder "PDMESH_MODEL_NAME" $root.Values.model.name "PDMESH_KV_MEMORY_MB" "1024" "PDMESH_PACKED_CACHE" "2.5" }}
            {{- if not $root.Values.prefill.enabled }}{{- $_ := set $own "PDMESH_ROLES" "prefill,decode" }}{{- end }}
            {{- $hasHttp := and $root.Values.gateway.enabled (eq .role "decode") }}
            {{- if $hasHttp }}{{- $_ := set $own "PDMESH_HTTP_PORT" "8000" }}{{- end }}
            {{- if $root.Values.tracing.enabled }}{{- $_ := set $own "PDMESH_OTLP_ENDPOINT" (include "pdmesh.otlpEndpoint" $root) }}{{- end }}
            {{- include "pdmesh.env" (dict "own" $own "given" .spec.env) | nindent 12 }}
            {{- if not (hasKey .spec.env "PDMESH_NUM_THREADS") }}
            # The engine's threads. The limit leaves a core to the event loop and to gRPC, or the quota would throttle all of
            # them.
            - name: PDMESH_NUM_THREADS
              valueFrom:
                resourceFieldRef:
                  containerName: {{ .role }}
                  resource: requests.cpu
            {{- end }}
            - name: PDMESH_ADVERTISE
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            - name: PDMESH_WORKER_ID
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            # A file: a variable is inherited by every child and appears in every dump of the environment.
            - name: PDMESH_REDIS_FILE
              value: /etc/pdmesh/redis/url
            - name: PDMESH_MESH_SECRET_FILE
              value: /etc/pdmesh/mesh-secret/secret
            - name: PDMESH_CACHE
              value: /var/cache/pdmesh
            {{- include "pdmesh.tlsEnv" $root | nindent 12 }}
          ports:
            - name: grpc
              containerPort: 50051
            - name: kv
              containerPort: 50052
            - name: scrape
              containerPort: 9464
            {{- if $hasHttp }}
            - name: http
              containerPort: 8000
            {{- end }}
          # It answers once the model is loaded.
          startupProbe:
            {{- include "pdmesh.probe" (dict "root" $root "port" 50051) | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: {{ div .spec.startupS 5 }}
          # The engine runs and the receiver of KV listens. Not serving after SIGTERM.
          readinessProbe:
            {{- include "pdmesh.probe" (dict "root" $root "port" 50051 "service" (printf "pdmesh.v1.%sService" (title .role))) | nindent 12 }}
            periodSeconds: 2
            timeoutSeconds: 2
          # The event loop answers; an engine that fails ends the process by itself.
          livenessProbe:
            {{- include "pdmesh.probe" (dict "root" $root "port" 50051) | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          # Memory: weights, KV (shared memory counts, too; it is a memfd, so /dev/shm needs no size) and a gigabyte for the rest.
          resources:
            {{- toYaml .spec.resources | nindent 12 }}
          {{- include "pdmesh.confined" . | nindent 10 }}
          volumeMounts:
            - name: models
              mountPath: /models
              readOnly: true
            - name: cache
              mountPath: /var/cache/pdmesh
            - name: mesh-secret
              mountPath: /etc/pdmesh/mesh-secret
              readOnly: true
            - name: redis
              mountPath: /etc/pdmesh/redis
              readOnly: true
            - name: tmp
              mountPath: /tmp
            {{- include "pdmesh.tlsMount" $root | nindent 12 }}
            {{- with .spec.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "pdmesh.modelVolume" (dict "root" $root "size" $root.Values.model.size) | nindent 8 }}
        - name: cache
          emptyDir:
            sizeLimit: {{ .spec.cacheSize }}
        {{- include "pdmesh.secretVolume" (dict "root" $root "name" "mesh-secret" "secret" "mesh-secret" "key" "secret") | nindent 8 }}
        {{- include "pdmesh.secretVolume" (dict "root" $root "name" "redis" "secret" "redis" "key" "url") | nindent 8 }}
        - name: tmp
          emptyDir:
            sizeLimit: {{ .spec.tmpSize }}
        {{- include "pdmesh.tlsVolume" $root | nindent 8 }}
        {{- with .spec.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}
